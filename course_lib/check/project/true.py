"""Is what a run folder says true? Its first and its last steps are run again, and must agree up to rounding."""

from collections.abc import Iterator
from statistics import mean

from course_lib.check.project.again import Part, Room
from course_lib.check.project.folder import START, Run, odd
from course_lib.check.project.weights import checkpoints, distance, unlike, weights
from course_lib.check.verdict import CheckFailed
from course_lib.train.checkpoint import step_of

FIRST = 6  # steps
LOSS = 1e-3  # part of the loss by which another machine's rounding may change it in so few steps
LOSS_16 = 3e-2  # the same for forwards in 16 bits
SAMPLES = 2  # of the test data that rounding may put on the other side
MOVED = 0.1  # part of the way from one checkpoint to the next by which rounding may change its end
CHANGED = "project.py was changed after the training, or metrics.jsonl or config.json was"


def first_steps(room: Room, run: Run) -> Part:
    """The losses of the first steps are what this configuration gives, else CheckFailed "metrics_edited".

    Or "checkpoints", when they are not there.
    """
    checkpoints(run)  # first what costs nothing
    part = room.part(run, min(max(FIRST, min(run.losses)), run.steps))  # at least one that is on record
    allowed = LOSS if run.config.amp.dtype == "none" else LOSS_16
    for step, said, loss in rows_again(run, part.losses):
        if not abs(said - loss) <= allowed * max(abs(loss), 1e-3):
            raise CheckFailed(
                f"{run.name}: metrics.jsonl says that the loss of step {step} was {said:.5g}; by this configuration "
                f"and the project.py of now it is {loss:.5g}. {CHANGED}. {START.format(name=run.name)}",
                "metrics_edited",
            )
    return part


def rows_again(run: Run, losses: dict[int, float]) -> Iterator[tuple[int, float, float]]:
    """(step, loss of metrics.jsonl, the same from `losses`, those of each step that the judge has run).

    A row is the mean over the steps since the row before: with --run.log_every 5 it stands for five.
    """
    before = 0
    for step in sorted(run.losses.keys() & losses.keys()):
        yield step, run.losses[step], mean(losses[one] for one in range(before + 1, step + 1))
        before = step


def last_steps(room: Room, run: Run) -> Part:
    """Training on from the older checkpoint gives the newest one, with the accuracy that metrics.jsonl has.

    Raises CheckFailed: "checkpoints", "weights_edited" or "accuracy_edited".
    """
    older, newest = checkpoints(run)[-2:]
    before, after = weights(run, older), weights(run, newest)
    part = room.part(run, run.steps, after=older)
    mine = part.weights(run.steps)
    steps = f"from the checkpoint of step {step_of(older)} to step {run.steps}"
    if what := unlike(after, mine) or unlike(before, mine):
        text = f"{run.name}: the network in the checkpoints is not that of project.py now: {what}."
        raise CheckFailed(f"{text} {START.format(name=run.name)}", "weights_edited")
    way, apart = distance(after, before), distance(mine, after)
    if not apart <= MOVED * way:
        raise CheckFailed(
            f"{run.name}: run again {steps}, the weights end {apart:.3g} away from those of the newest checkpoint, and "
            f"the whole way is {way:.3g} long. The checkpoint comes from other steps, or {CHANGED}. "
            f"{START.format(name=run.name)}",
            "weights_edited",
        )
    _refuse_accuracy(run, part)
    return part


def _refuse_accuracy(run: Run, part: Part) -> None:
    if run.steps not in part.accuracies:
        raise odd(run.name, "config.json", f"{run.steps} steps are no whole number of epochs")
    mine, samples = part.accuracies[run.steps], next(r["samples"] for r in reversed(part.rows) if r["event"] == "eval")
    if abs(run.accuracy - mine) * samples > SAMPLES + 0.5:
        raise CheckFailed(
            f"{run.name}: metrics.jsonl says that the test accuracy of step {run.steps} was {run.accuracy:.4f}; the "
            f"weights of that step reach {mine:.4f}. The row was changed. {START.format(name=run.name)}",
            "accuracy_edited",
        )
