"""Exercise 16, the report: report.html about the six runs, and what follows from them in numbers."""

import math
from pathlib import Path
from statistics import mean, median
from typing import Any

from course_lib.check.project import again, folder
from course_lib.check.project.files import is_number, odd
from course_lib.check.project.folder import Run
from course_lib.check.project.pages import refuse_other_page
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed

RUNS = ["runs/one", "runs/ddp", "runs/slow", "runs/fast", "runs/killed", "runs/hook"]
KEYS = ("speedup", "efficiency", "comm_share", "predicted_speedup", "off_by")
APART = 0.02  # as a part of the number; of comm_share as a part of the step
STEPS, WARM = 20, 5
LOOKS = 2  # for a second one there must be a reason
FAR = 4  # times: a busy machine can slow one of two runs down so much


def stage(project: Path, told: Any) -> list[str]:
    """The lines of the verdict; raises CheckFailed."""
    runs = {name: folder.read(project, name) for name in RUNS}
    one, ddp = runs["runs/one"], runs["runs/ddp"]
    refuse_other_page(project, RUNS)
    if not isinstance(told, dict) or any(not is_number(told.get(key)) for key in KEYS):
        text = f"conclusions() must return a dict with the numbers {', '.join(KEYS)}; it returned {told!r:.120}."
        raise CheckFailed(text, "shape")
    refuse_speedup(told, one, ddp)
    refuse_share(told["comm_share"], runs)
    refuse_prediction(told)
    with again.room(project) as room:
        refuse_other_speeds(room, one, ddp)
    return [
        "report.html says what the six run folders say",
        f"{ddp.ranks} ranks are {told['speedup']:.2f} times as fast as one, an efficiency of {told['efficiency']:.0%}; "
        f"{told['comm_share']:.0%} of a step is communication that nothing hides",
        f"predicted were {told['predicted_speedup']:g} times; the measured value is {told['off_by']:.2f} of that",
    ]


def speeds(run: Run) -> list[float]:
    """samples/s of each row of training."""
    return [row["samples_per_s"] for row in run.rows("train") if is_number(row.get("samples_per_s"))]


def refuse_speedup(told: dict[str, float], one: Run, ddp: Run) -> None:
    """Both from the medians of the rows, as in the table of report.html."""
    alone, together = speeds(one), speeds(ddp)
    if not alone or not together or min(*alone, *together) <= 0:
        raise odd("runs/one or runs/ddp", "metrics.jsonl", "its rows have no samples_per_s")
    right, ranks = median(together) / median(alone), ddp.ranks
    if not near(told["speedup"], right):
        wrong = [
            ("upside_down", 1 / right, "That is one process against several: divide the other way round."),
            ("efficiency_for_speedup", right / ranks, "That is the efficiency."),
            ("not_the_median", mean(together) / mean(alone), "Those are means, which one slow step moves: medians."),
            ("not_the_median", max(together) / max(alone), "Those are the best rows: take the medians."),
            ("not_the_median", together[-1] / alone[-1], "Those are the last rows: take the medians."),
        ]
        _refuse("speedup", told["speedup"], right, wrong, "median samples/s of runs/ddp / that of runs/one")
    if not near(told["efficiency"], right / ranks):
        wrong = [
            ("per_cent", 100 * right / ranks, "That is in per cent: a part of 1 was asked for."),
            ("speedup_for_efficiency", right, f"Divide the speedup by the {ranks} ranks."),
        ]
        _refuse("efficiency", told["efficiency"], right / ranks, wrong, "speedup / ranks")


def refuse_share(share: float, runs: dict[str, Run]) -> None:
    """comm_share of runs/ddp, the median of its rows."""
    found = {
        name: {key: [r[key] for r in run.rows("train") if is_number(r.get(key))] for key in ("comm_share", "overlap")}
        for name, run in runs.items()
    }
    mine = found["runs/ddp"]
    if not mine["comm_share"]:
        raise odd("runs/ddp", "metrics.jsonl", "no row has a comm_share")
    right = median(mine["comm_share"])
    if abs(share - right) <= APART:
        return
    wrong = [("per_cent", 100 * right, "That is in per cent: a part of 1 was asked for.")]
    if mine["overlap"]:
        wrong.append(("overlap_for_share", median(mine["overlap"]), "That is `overlap`, what backward hides."))
    wrong += [
        ("of_another_run", median(rows["comm_share"]), f"That is comm_share of {name}.")
        for name, rows in found.items()
        if name != "runs/ddp" and rows["comm_share"]
    ]
    wrong.append(("not_the_median", mine["comm_share"][-1], "That is the last row: take the median of all."))
    _refuse("comm_share", share, right, wrong, "the median of comm_share in runs/ddp/metrics.jsonl")


def refuse_prediction(told: dict[str, float]) -> None:
    """Any prediction will do, but it must be one, and be compared."""
    predicted = told["predicted_speedup"]
    if predicted <= 0:
        raise CheckFailed(f"predicted_speedup is {predicted:g}: what did you expect? It is above 0.", "no_prediction")
    right = told["speedup"] / predicted
    if not near(told["off_by"], right):
        wrong = [
            ("off_upside_down", 1 / right, "Divide the measured value by the predicted one."),
            ("difference", told["speedup"] - predicted, "That is the difference; a ratio was asked for."),
        ]
        _refuse("off_by", told["off_by"], right, wrong, "speedup / predicted_speedup")


def refuse_other_speeds(room: again.Room, one: Run, ddp: Run) -> None:
    """Is the speedup of the folders one that this machine can have? Something else may disturb a look, not each."""
    said, seen = median(speeds(ddp)) / median(speeds(one)), []
    while len(seen) < LOOKS:
        alone, together = (speed_again(room, run) for run in (one, ddp))
        seen.append(together / alone)
        if seen[-1] / FAR < said < seen[-1] * FAR:
            return
    raise CheckFailed(
        f"By the run folders {ddp.ranks} ranks are {said:.2f} times as fast as one; run again one after the other, "
        f"they are {' and '.join(f'{ratio:.2f}' for ratio in seen)} times as fast. metrics.jsonl was changed after the "
        "training, or the machine was busy during one of the two: train both again in new folders.",
        "metrics_edited",
    )


def speed_again(room: again.Room, run: Run) -> float:
    """samples/s of the run's first steps, run again now."""
    rows = [row for row in room.part(run, until=STEPS).rows if row["event"] == "train" and row["step"] > WARM]
    return median(row["samples_per_s"] for row in rows)


def near(got: float, want: float) -> bool:
    """Equal up to rounding to a few digits."""
    return math.isclose(got, want, rel_tol=APART)


def _refuse(key: str, got: float, right: float, wrong: list[tuple[str, float, str]], formula: str) -> None:
    head = f"{key}: {right:.3f} was expected (within {APART:.0%}), and not {got:.4g}."
    for mistake, value, words in wrong:
        if near(got, value):
            raise CheckFailed(f"{head} {words}", mistake)
    raise CheckFailed(f"{head} It is {formula}.", key)


REPORT = FolderSpec("16_project", stage, 10, "report", "conclusions")
