"""Stage survival: runs/killed was killed with -9 and continued, and ends with the bits of runs/ddp."""

from itertools import pairwise
from pathlib import Path

from course_lib.check.project import again, ddp
from course_lib.check.project.folder import Run, is_number, read
from course_lib.check.project.job import refuse_copy, refuse_other
from course_lib.check.project.weights import checkpoints, distance, same_bits, unlike, weights
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed
from course_lib.train.launches import Launch, launches

NAME = "runs/killed"
LOST = "lost the connection to another rank"  # what a rank says, in status.json, when another one was killed
AT, EVERY = 5, 4  # the judge kills after so many steps, of a run that is saved after each 4th
KILL = "Train into a new folder, kill a rank with kill -9 in the middle of the run, as the kill button does, and go on."


def stage(project: Path) -> list[str]:
    """The lines of the verdict. Raises CheckFailed."""
    run, straight = read(project, NAME), read(project, ddp.NAME)
    if run.ranks != straight.ranks:
        text = (
            f"{NAME} ended on {run.ranks} ranks, {ddp.NAME} on {straight.ranks}; to have the same bits, take as many."
        )
        raise CheckFailed(text, "ranks")
    refuse_other(run, straight)
    killed, then = the_kill(run)
    refuse_copy(run, straight, KILL)
    refuse_other_weights(run, straight)
    with again.room(project) as room:
        step = kill_and_continue(room, run)
    return [
        f"killed with -9 at step {killed.last}, continued from the checkpoint of step {then.first}",
        f"the weights after step {run.steps} are those of {ddp.NAME}, to the last bit",
        f"killed by the judge, too, and continued: after step {step} the same bits as without the kill",
    ]


def the_kill(run: Run) -> tuple[Launch, Launch]:
    """A launch that was killed in the middle, and the one that went on; raises CheckFailed when there is none."""
    last = {"status": "finished", "why": "", "step": run.steps}
    found = launches(run.rows("start"), last)
    if len(found) < 2:
        raise CheckFailed(f"{NAME} was started once, so nobody killed it. {KILL}", "no_kill")
    pairs = list(pairwise(found))
    kills = [(one, then) for one, then in pairs if was_killed(one)]
    if not kills:
        raise _not_killed(found[-2])
    middle = [(one, then) for one, then in kills if is_number(one.last) and one.last < run.steps]
    if not middle:
        text = f"{NAME} was killed when all its {run.steps} steps were done, so there was nothing to survive. {KILL}"
        raise CheckFailed(text, "killed_after_end")
    if went_on := [(one, then) for one, then in middle if then.first > 0]:
        return went_on[-1]
    raise CheckFailed(
        f"{NAME} was killed at step {middle[-1][0].last}, before it had a checkpoint, and began anew: nothing has "
        f"survived. Let a checkpoint be written first (--run.save_every 10), then kill. {KILL}",
        "from_scratch",
    )


def was_killed(launch: Launch) -> bool:
    """All its processes died without a word; or one did, and another one saw the connection break."""
    return launch.status == "killed" or (launch.status == "failed" and LOST in launch.why)


def _not_killed(launch: Launch) -> CheckFailed:
    why = f" ({launch.why[:200]})" if launch.why else ""
    if launch.status == "stopped":
        text = (
            f"was stopped in good order{why}: it saved first, as SIGTERM lets it do. kill -9 leaves no time for that."
        )
        return CheckFailed(f"{NAME} {text} {KILL}", "stopped")
    if launch.status == "finished":
        text = "was started again when it had finished, so there was nothing to survive."
        return CheckFailed(f"{NAME} {text} {KILL}", "killed_after_end")
    text = f"was not killed: the launch before the last one ended as {launch.status[:40]!r}{why}."
    return CheckFailed(f"{NAME} {text} {KILL}", "not_killed")


def refuse_other_weights(run: Run, straight: Run) -> None:
    """Both trained on one machine, so the bits must be the same."""
    mine, theirs = (weights(r, checkpoints(r)[-1]) for r in (run, straight))
    if same_bits(mine, theirs):
        return
    apart = unlike(mine, theirs) or f"they are {distance(mine, theirs):.3g} apart"
    raise CheckFailed(
        f"{NAME} ends with other weights than {ddp.NAME}: {apart}. Train both on one machine, with the same "
        "project.py: the bits are the same then, if the network keeps all that it remembers in parameters and buffers.",
        "other_weights",
    )


def kill_and_continue(room: again.Room, run: Run) -> int:
    """A run of the judge's, killed and continued, against one left alone; returns the step in which they are equal."""
    saved = {"run.save_every": EVERY}
    broken = room.killed(run, AT, changes=saved)
    if not broken.steps:
        text = f"{NAME}: run again and killed after step {AT}, there is no checkpoint of step {EVERY}."
        raise CheckFailed(text, "does_not_run_again")
    until = min(broken.steps[-1] + EVERY, run.steps)
    hurt = room.part(run, until, changes=saved, into=broken.path)
    whole = room.part(run, until, changes=saved)
    if same_bits(hurt.weights(until), whole.weights(until)):
        return until
    first = next((step for step, loss in whole.losses.items() if hurt.losses.get(step) != loss), until)
    raise CheckFailed(
        f"{NAME}: the judge killed a rank of the same run, and continued it from step {broken.steps[-1]}; from step "
        f"{first} on it is another run than one left alone. The network must keep all that it remembers from step to "
        "step in parameters and buffers, and draw random numbers from torch's generator only.",
        "not_survivable",
    )


SURVIVAL = FolderSpec("16_project", stage, 15, "survival")
