"""Stage one: runs/one, the job in one process."""

from pathlib import Path

from course_lib.check.project import again
from course_lib.check.project.folder import PROJECT, Run, read
from course_lib.check.project.true import first_steps, last_steps
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed

NAME = "runs/one"
ENOUGH = 0.95


def stage(project: Path) -> list[str]:
    """The lines of the verdict. Raises CheckFailed."""
    run = read(project, NAME)
    refuse_other_job(run)
    if run.ranks != 1:
        raise CheckFailed(f"{NAME} was trained by {run.ranks} ranks, and one is wanted: ranks=1.", "ranks")
    if run.accuracy < ENOUGH:
        raise CheckFailed(
            f"{NAME} ends with a test accuracy of {run.accuracy:.4f}, and {ENOUGH} is asked for. More epochs, another "
            "learning rate or a wider network may do; train into a new folder, or remove this one first.",
            "accuracy",
        )
    with again.room(project) as room:
        first = first_steps(room, run)
        last = last_steps(room, run)
    return [
        f"one process, {run.steps} steps, test accuracy {run.accuracy:.4f}",
        f"the first {len(first.losses)} steps, run again, have the losses of metrics.jsonl",
        f"the last {len(last.losses)} steps, run again, end with the weights and the accuracy that are there",
    ]


def refuse_other_job(run: Run) -> None:
    """The project is about the digits, and about the learner's own network."""
    if run.config.data.name != "digits" or run.data_name != "digits":
        raise CheckFailed(
            f"{run.name} was trained on {run.config.data.name}; the data here are the digits: DataConfig('digits').",
            "other_data",
        )
    if not run.config.model.name.startswith(f"{PROJECT}:"):
        raise CheckFailed(
            f"{run.name} trains the network {run.config.model.name} of the course. Train the one that you wrote: "
            'ModelConfig(f"{__file__}:network") in recipe().',
            "ready_made_network",
        )


ONE = FolderSpec("16_project", stage, 10, "one")
