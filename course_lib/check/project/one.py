"""Stage one: runs/one, the job in one process."""

import json
from pathlib import Path

from course_lib.check.project import again
from course_lib.check.project.folder import PROJECT, Run, read
from course_lib.check.project.true import first_steps, last_steps
from course_lib.check.spec import FolderSpec
from course_lib.check.verdict import CheckFailed

NAME = "runs/one"
ENOUGH = 0.95  # of test accuracy, for the digits
IMAGES = "imagefolder"  # or one's own images: half of the way from guessing to all right


def stage(project: Path) -> list[str]:
    """The lines of the verdict. Raises CheckFailed."""
    run = read(project, NAME)
    refuse_other_job(run)
    if run.ranks != 1:
        raise CheckFailed(f"{NAME} was trained by {run.ranks} ranks, and one is wanted: ranks=1.", "ranks")
    if is_digits(run):
        refuse_low_accuracy(run, ENOUGH)
    with again.room(project) as room:
        first = first_steps(room, run)
        if not is_digits(run):
            refuse_low_accuracy(run, half_of_the_way(first))
        last = last_steps(room, run)
    return [
        f"one process, {run.steps} steps, test accuracy {run.accuracy:.4f}",
        f"the first {len(first.losses)} steps, run again, have the losses of metrics.jsonl",
        f"the last {len(last.losses)} steps, run again, end with the weights and the accuracy that are there",
    ]


def is_digits(run: Run) -> bool:
    """Else an image folder."""
    return run.config.data.name == "digits"


def half_of_the_way(part: again.Part) -> float:
    """With ten classes a guess is right once in ten times, so 0.55: between that and always."""
    classes = json.loads((part.path / "config.json").read_text())["data"]["classes"]  # the judge's own, not the run's
    return (1 / classes + 1) / 2


def refuse_low_accuracy(run: Run, enough: float) -> None:
    """Raises CheckFailed."""
    if run.accuracy < enough:
        raise CheckFailed(
            f"{NAME} ends with a test accuracy of {run.accuracy:.4f}, and {enough:.4g} is asked for. More epochs, "
            "another learning rate or a wider network may do; train into a new folder, or remove this one first.",
            "accuracy",
        )


def refuse_other_job(run: Run) -> None:
    """The project is about the digits or a folder of images, and about the learner's own network."""
    asked, opened = (str(name).partition(":")[0] for name in (run.config.data.name, run.data_name))
    if asked != opened or asked not in ("digits", IMAGES):
        raise CheckFailed(
            f"{run.name} was trained on {run.config.data.name}; the data here are the digits, DataConfig('digits'), or "
            "your own images, DataConfig('imagefolder:PATH', side=...).",
            "other_data",
        )
    if not run.config.model.name.startswith(f"{PROJECT}:"):
        raise CheckFailed(
            f"{run.name} trains the network {run.config.model.name} of the course. Train the one that you wrote: "
            'ModelConfig(f"{__file__}:network") in recipe().',
            "ready_made_network",
        )


ONE = FolderSpec("16_project", stage, 10, "one")
