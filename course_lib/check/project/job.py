"""Whether two runs are the same job: what may differ is where and how fast, and nothing of what is computed."""

import math
from collections.abc import Iterable

from course_lib.check.project.folder import Run, is_number
from course_lib.check.verdict import CheckFailed
from course_lib.train.config import as_json
from course_lib.train.folder import differences
from course_lib.train.optim import peak_rate

EPOCHS = "optim.epochs"  # a run may be continued with more of them, but then it is another one


def refuse_other(run: Run, like: Run, without: Iterable[str] = ()) -> None:
    """Raise CheckFailed when `run` is not the job of `like`, by the first difference that has a name.

    without  options that may differ
    """
    apart = {text.split()[0] for text in differences(as_json(like.config), as_json(run.config))}
    if run.config.optim.epochs != like.config.optim.epochs:
        apart.add(EPOCHS)
    apart -= set(without)
    if run.facts.get("parameters") != like.facts.get("parameters"):
        apart.add("parameters")
    for known in (_global_batch, _rate, _seed, _epochs, _network):
        if found := known(run, like, apart):
            name, text = found
            raise CheckFailed(f"{run.name} is not the job of {like.name}: {text}", name)
    if apart:
        told = "; ".join(f"{option} is {run.options[option]}, not {like.options[option]}" for option in sorted(apart))
        raise CheckFailed(f"{run.name} is not the job of {like.name}: {told}. Use the same options.", "other_job")


def refuse_copy(run: Run, like: Run, cure: str) -> None:
    """Raise CheckFailed "copied": two trainings never take the same time in each step, to the last digit."""
    times = [{row["step"]: row.get("samples_per_s") for row in r.rows("train")} for r in (run, like)]
    common = [step for step, value in times[0].items() if is_number(value) and step in times[1]]
    same = [step for step in common if times[0][step] == times[1][step]]
    if len(same) > 2 and len(same) > len(common) / 10:
        text = f"{len(same)} of {len(common)} rows have the same samples_per_s in both, to the last digit"
        raise CheckFailed(f"{run.name} is a copy of {like.name}: {text}. {cure}", "copied")


Named = tuple[str, str] | None


def _global_batch(run: Run, like: Run, apart: set[str]) -> Named:
    if "data.global_batch" not in apart:
        return None
    mine, theirs = run.config.data.global_batch, like.config.data.global_batch
    text = f"{mine} samples a step instead of {theirs}."
    if mine * like.ranks == theirs * run.ranks:
        return "global_batch_grew", (
            f"{text} The global batch grew with the ranks: each rank takes as many samples as one process did, and "
            "an epoch has fewer steps. Set --data.global_batch, which all ranks share, and leave --data.batch at 0."
        )
    return "global_batch", f"{text} Leave --data.global_batch as it was: each rank takes its part of it."


def _rate(run: Run, like: Run, apart: set[str]) -> Named:
    if not apart & {"optim.lr", "optim.reference_batch"}:
        return None
    mine, theirs = run.config.optim, like.config.optim
    text = f"--optim.lr is {mine.lr:g} instead of {theirs.lr:g}"
    if mine.reference_batch != theirs.reference_batch:
        text += f", --optim.reference_batch {mine.reference_batch} instead of {theirs.reference_batch}"
    before, after = peak_rate(theirs, like.config.data.global_batch), peak_rate(mine, run.config.data.global_batch)
    if math.isclose(after * like.ranks, before * run.ranks):
        return "rate_scaled", (
            f"{text}: multiplied by the ranks. A rate is scaled with the global batch, and that is the same here: the "
            "gradients are the same averages as before. Leave the rate as it was."
        )
    return "other_rate", f"{text}. Leave the rate as it was: the global batch is the same."


def _seed(run: Run, like: Run, apart: set[str]) -> Named:
    if "run.seed" not in apart:
        return None
    seeds = f"--run.seed is {run.config.run.seed} instead of {like.config.run.seed}"
    return "other_seed", f"{seeds}, so it begins with other weights and sees the samples in another order."


def _epochs(run: Run, like: Run, apart: set[str]) -> Named:
    if EPOCHS not in apart:
        return None
    mine, theirs = run.config.optim.epochs, like.config.optim.epochs
    return "other_epochs", f"{mine} epochs instead of {theirs}, and the rates follow the number of epochs."


def _network(run: Run, like: Run, apart: set[str]) -> Named:
    different = sorted(option for option in apart if option.startswith("model.") or option == "parameters")
    if not different:
        return None
    if different == ["parameters"]:
        numbers = f"{run.facts.get('parameters')} parameters instead of {like.facts.get('parameters')}"
        return "other_network", f"its network had {numbers}. Was project.py changed in between? Train both again."
    told = "; ".join(f"{o} is {run.options[o]}, not {like.options[o]}" for o in different if o != "parameters")
    return "other_network", f"another network: {told}."
