"""Exercise 16, speed: two thieves are named from the trace of runs/slow, and runs/fast does the same work without them.

Nothing is believed: both runs are started again for some steps, in turn.
"""

import math
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.check.project import again, folder
from course_lib.check.project.disk import refuse_mended_disk
from course_lib.check.project.evidence import refuse_evidence
from course_lib.check.project.folder import Run
from course_lib.check.project.job import refuse_other
from course_lib.check.project.spans import THIEVES, Reading, reading, recorded
from course_lib.check.project.true import rows_again
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed
from course_lib.parallel.traces import read_spans

SLOW_DATA = f"{folder.PROJECT}:slow_disk"
STEPS, WARM, TURNS = 10, 3, 2  # that are run again; of these the first do not count; how often, in turn
LEAST = 1.3  # times as fast
FAR = 4  # times: so much may shares of the same steps differ from one day to another
MOST_WORKERS = 16  # of a rank: the judge starts them, too
# May differ between slow and fast: the numbers that come out stay the same, but for rounding.
FREE = ("ddp.bucket_mb", "ddp.gradient_as_bucket_view", "ddp.static_graph")


def stage(project: Path, evidence: Any) -> list[str]:
    """The lines of the verdict; raises CheckFailed."""
    slow, fast = folder.read(project, "runs/slow"), folder.read(project, "runs/fast")
    refuse_no_thieves(slow)
    ddp = folder.read(project, "runs/ddp")
    refuse_other(slow, ddp, without=("data.name", "optim.epochs"))
    refuse_other_work(slow, fast)
    seen = recorded(slow)
    refuse_evidence(evidence, seen, recorded(fast))
    refuse_thieves_left(fast)
    refuse_mended_disk(project)
    with again.room(project) as room:
        refuse_other_data(room, slow, ddp)
        mine, speeds = in_turn(room, slow, fast)
    refuse_other_trace(seen, mine)
    times = refuse_not_faster(slow, fast, speeds)
    return [
        f"runs/slow: ranks spend {seen.share(THIEVES[seen.thief]):.0%} of their time on {seen.thief}, and go forward "
        f"{round(seen.passes)} times a step",
        "runs/fast does the same work: the losses of runs started again agree",
        f"runs/fast is {times:.1f} times as fast as runs/slow, started again in turn",
    ]


def refuse_no_thieves(slow: Run) -> None:
    """runs/slow must be the job with both of them."""
    data = slow.config.data
    if slow.ranks < 2:
        raise CheckFailed("runs/slow has one rank: train it with ranks=2 or more.", "one_rank")
    if data.name != SLOW_DATA:
        text = f"runs/slow has the data {data.name}; it is the run with --data.name {SLOW_DATA}."
        raise CheckFailed(text, "not_slow")
    if data.workers or data.accumulate == 1:
        raise CheckFailed(
            "runs/slow has one of the cures already: it must have no loader workers, and --data.batch 6. The cures "
            "belong to runs/fast.",
            "not_slow",
        )


def refuse_other_work(slow: Run, fast: Run) -> None:
    """The same samples a step, the same network, the same arithmetic."""
    if fast.ranks != slow.ranks:
        text = f"runs/slow has {slow.ranks} ranks and runs/fast {fast.ranks}. More ranks are no cure: take as many."
        raise CheckFailed(text, "other_ranks")
    if fast.config.data.name != slow.config.data.name:
        raise CheckFailed(
            f"runs/fast has the data {fast.config.data.name}, and runs/slow {slow.config.data.name}. The disk stays as "
            "slow as it is: load from it while something is computed.",
            "other_data",
        )
    refuse_other(fast, slow, without=FREE)


def refuse_thieves_left(fast: Run) -> None:
    """As its configuration says."""
    data = fast.config.data
    if not data.workers:
        text = "runs/fast has no loader workers, so each rank still loads its samples itself while nothing is computed."
        raise CheckFailed(text, "data_thief_left")
    if data.workers > MOST_WORKERS:
        text = f"runs/fast has {data.workers} workers for each rank; the judge starts {MOST_WORKERS} at most."
        raise CheckFailed(text, "too_many_workers")
    if data.accumulate > 1:
        raise CheckFailed(
            f"In runs/fast a rank still goes forward and backward {data.accumulate} times a step, with {data.batch} "
            "samples each time. They fit into memory at once: leave --data.batch out.",
            "small_batch_left",
        )


def refuse_other_data(room: again.Room, slow: Run, ddp: Run) -> None:
    """The slow disk must give the data of runs/ddp: a few steps on those themselves have the same losses."""
    name = ddp.config.data.name
    known = room.part(slow, until=3, changes={"data.name": name, "data.batch": 0, "data.accumulate": 0})
    refuse_losses(slow, known.losses, f"trained on {name} itself", "edited_data")


def in_turn(room: again.Room, slow: Run, fast: Run) -> tuple[Reading, dict[str, float]]:
    """What the judge's own trace of runs/slow says, and samples/s of both."""
    found: dict[str, list[float]] = {slow.name: [], fast.name: []}
    first = None
    for turn in range(TURNS):
        for run in (slow, fast):
            changes: dict[str, Any] = {"data.workers": run.config.data.workers}
            if run is slow and not turn:
                changes |= {"measure.profile_at": STEPS - 1, "measure.profile_steps": 2}
            part = room.part(run, until=STEPS, changes=changes)
            refuse_losses(run, part.losses, "started again", "edited_losses")
            first = first or part
            rows = [row for row in part.rows if row["event"] == "train" and WARM < row["step"] < STEPS - 1]
            found[run.name] += [row["samples_per_s"] for row in rows]
    return reading(read_spans(first.path)), {name: median(speeds) for name, speeds in found.items()}


def refuse_not_faster(slow: Run, fast: Run, speeds: dict[str, float]) -> float:
    """How many times as fast `fast` is, by samples/s of both."""
    times = speeds[fast.name] / speeds[slow.name]
    if times < LEAST:
        raise CheckFailed(
            f"Run again in turn, {STEPS} steps each, runs/fast makes {speeds[fast.name]:,.0f} samples/s and "
            f"runs/slow {speeds[slow.name]:,.0f}: {times:.2f} times as many, and {LEAST} are asked for. Does the trace "
            "of runs/fast still show one of the thieves?",
            "not_faster",
        )
    return times


def refuse_losses(run: Run, losses: dict[int, float], how: str, mistake: str) -> None:
    """The first rows of a run folder against the losses of each step that the judge has run."""
    for step, said, mine in rows_again(run, losses):
        if not math.isclose(said, mine, rel_tol=1e-3, abs_tol=1e-5):
            raise CheckFailed(
                f"{run.name}/metrics.jsonl has a loss of {said:.5f} at step {step}; {how}, it is "
                f"{mine:.5f}. Has project.py changed since, or the file? Train {run.name} anew.",
                mistake,
            )


def refuse_other_trace(seen: Reading, mine: Reading) -> None:
    """Shares depend on the machine and on what else it does, but not by that much."""
    part = THIEVES[seen.thief]
    if not mine.share(part) / FAR < seen.share(part) < mine.share(part) * FAR:
        raise CheckFailed(
            f"The traces of runs/slow say {seen.thief}, {seen.share(part):.0%} of the step. Started again, its trace "
            f"says {mine.share(part):.0%}. Train runs/slow anew.",
            "edited_trace",
        )


SPEED = FolderSpec("16_project", stage, 20, "speed", "evidence")
