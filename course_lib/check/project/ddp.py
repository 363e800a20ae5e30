"""Stage ddp: runs/ddp, the job of runs/one on several ranks, equal to one process."""

from pathlib import Path

from course_lib.check.project import again, one
from course_lib.check.project.folder import Run, read
from course_lib.check.project.job import refuse_copy, refuse_other
from course_lib.check.project.probe import why_unequal
from course_lib.check.project.true import first_steps, last_steps
from course_lib.check.project.weights import apart_at
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed

NAME = "runs/ddp"
STEPS = 10
ROUNDING = 1e-9  # of the largest number of a tensor, after some steps in float64
EXACT = {
    "model.dtype": "float64", "amp.dtype": "none", "run.device": "cpu", "run.save_every": 1, "run.keep": STEPS,
}  # fmt: skip


def stage(project: Path) -> list[str]:
    """The lines of the verdict. Raises CheckFailed."""
    run = read(project, NAME)
    if run.ranks < 2:
        raise CheckFailed(f"{NAME} was trained by one rank. Train with ranks=2, or more.", "one_rank")
    one.refuse_other_job(run)
    alone = read(project, one.NAME)
    refuse_other(run, alone)
    refuse_copy(run, alone, "Train it on two ranks or more.")
    with again.room(project) as room:
        first = first_steps(room, run)
        apart = refuse_unequal(room, run)
        last = last_steps(room, run)
    return [
        f"{run.ranks} ranks, the same {run.steps} steps of {run.config.data.global_batch} samples as {one.NAME}",
        f"in float64, {run.ranks} ranks and one process have the same weights after each of {STEPS} steps; the largest "
        f"difference is {apart:.1e}",
        f"the first {len(first.losses)} and the last {len(last.losses)} steps, run again, give what is there",
    ]


def refuse_unequal(room: again.Room, run: Run) -> float:
    """Compare the weights of N ranks and of one process after each step; returns the largest difference."""
    steps = min(STEPS, run.steps)
    try:
        alone, together = (room.part(run, steps, ranks, changes=EXACT) for ranks in (1, run.ranks))
    except CheckFailed as problem:
        if problem.mistake != "does_not_run_again":
            raise
        why = "This part runs in float64, with --model.dtype float64: the network must take the images as they come."
        raise CheckFailed(f"{problem}\n{why}", problem.mistake) from None
    apart, step, where = apart_at(together, alone, steps, ROUNDING)
    if not apart <= ROUNDING:
        name, why = why_unequal(room.project, run)
        raise CheckFailed(
            f"{NAME} is not equal to one process: in float64, after step {step}, {run.ranks} ranks and one process "
            f"differ in {where} by {apart:.1e} of its largest number, and rounding makes 1e-15.\n{why}",
            name,
        )
    return apart


DDP = FolderSpec("16_project", stage, 20, "ddp")
