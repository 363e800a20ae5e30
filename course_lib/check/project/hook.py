"""Stage hook: runs/hook was trained with the learner's own all-reduce, and equals DDP up to rounding."""

from dataclasses import replace
from pathlib import Path

from course_lib.check.engine import judge
from course_lib.check.project import again, ddp, one
from course_lib.check.project.folder import PROJECT, Run, read
from course_lib.check.project.hook_ranks import SPEC
from course_lib.check.project.job import refuse_copy, refuse_other
from course_lib.check.project.ring import NAME as RING
from course_lib.check.project.ring import Named, refuse_wrong_ring
from course_lib.check.project.true import first_steps, last_steps
from course_lib.check.project.weights import apart_at
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed

NAME = "runs/hook"
STEPS = 5
RANKS = 3  # with two, sums have no order, and a ring has no direction
BATCH = 48  # which 3 divides


def stage(project: Path) -> list[str]:
    """The lines of the verdict. Raises CheckFailed."""
    run = read(project, NAME)
    name = refuse_other_hook(run)
    if run.ranks < 2:
        raise CheckFailed(
            f"{NAME} was trained by one rank, which has nobody to talk to. Take ranks=2, or more.", "one_rank"
        )
    one.refuse_other_job(run)
    plain = read(project, ddp.NAME)
    refuse_other(run, plain, without=["ddp.comm_hook"])
    refuse_copy(run, plain, f"Train it with --ddp.comm_hook {PROJECT}:{name}.")
    refuse_wrong_ring(project)
    lines = judge(replace(SPEC, function=name), Named(project, name)).lines
    with again.room(project) as room:
        first = first_steps(room, run)
        apart = refuse_unequal(room, run)
        last = last_steps(room, run)
    return [
        f"{RING} is right on 1, 2, 3 and 4 ranks, as in exercise 03",
        *lines,
        f"in float64, {RANKS} ranks have the weights of DDP's own average after each of {STEPS} steps; the largest "
        f"difference is {apart:.1e}",
        f"{run.ranks} ranks, {run.steps} steps; the first {len(first.losses)} and the last {len(last.losses)}, run "
        "again, give what is there",
    ]


def refuse_other_hook(run: Run) -> str:
    """The name of the function in project.py; raises CheckFailed when the run had none of it."""
    hook = run.config.ddp.comm_hook
    how = f"Train with --ddp.comm_hook {PROJECT}:hook."
    if hook == "none":
        raise CheckFailed(f"{NAME} was trained without a comm hook: DDP averaged by itself. {how}", "no_hook")
    if not hook.startswith(f"{PROJECT}:"):
        raise CheckFailed(
            f"{NAME} was trained with the hook {hook} of the course, not with yours. {how}", "course_hook"
        )
    return hook.rpartition(":")[2]


def refuse_unequal(room: again.Room, run: Run) -> float:
    """The learner's network, with the hook and without; returns the largest difference of weights."""
    steps = min(STEPS, run.steps)
    changes = {**ddp.EXACT, "data.global_batch": BATCH, "data.batch": 0, "data.accumulate": 0}
    mine = room.part(run, steps, RANKS, changes=changes)
    wanted = room.part(run, steps, RANKS, changes=changes | {"ddp.comm_hook": "none"})
    apart, step, where = apart_at(mine, wanted, steps, ddp.ROUNDING)
    if not apart <= ddp.ROUNDING:
        raise CheckFailed(
            f"{NAME}: in float64, after step {step}, {RANKS} ranks with the hook differ from DDP's own average in "
            f"{where} by {apart:.1e} of its largest number, and rounding makes 1e-15. Does it average all of each "
            "bucket, and does it keep nothing from one bucket to the next?",
            "not_equal",
        )
    return apart


HOOK = FolderSpec("16_project", stage, 15, "hook")
