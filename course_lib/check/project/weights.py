"""Checkpoints of a run, read with suspicion: sizes first, then sha256, and never a pickle that could run code."""

import json
from pathlib import Path

import torch

from course_lib.check.project.again import Part
from course_lib.check.project.folder import MEGABYTE, START, Run, as_dict, content
from course_lib.check.verdict import CheckFailed
from course_lib.train import checkpoint
from course_lib.train.manifest import Damaged, read

LARGEST = 512 * MEGABYTE  # of a state.pt
State = dict[str, torch.Tensor]


def checkpoints(run: Run) -> list[Path]:
    """The checkpoints that were kept, oldest first: at least two, the newest of the last step.

    Raises CheckFailed, mistake "checkpoints".
    """
    found = [path for path in checkpoint.saved(run.path) if not path.is_symlink()]
    steps = [checkpoint.step_of(path) for path in found]
    if len(found) >= 2 and steps[-1] == run.steps:
        return found
    there = f"those of the steps {', '.join(map(str, steps))}" if steps else "none"
    raise CheckFailed(
        f"{run.name}/checkpoints must have that of the last step, {run.steps}, and an older one, and has {there}. "
        f"Leave --run.keep at 2 or more, and remove no checkpoint. {START.format(name=run.name)}",
        "checkpoints",
    )


def weights(run: Run, path: Path) -> State:
    """The network's parameters and buffers in a checkpoint, by name, on the CPU."""
    where = f"{run.name}/checkpoints/{path.name}"
    try:
        listed = as_dict(json.loads(content(path / "manifest.json", where, MEGABYTE))).get("files")
    except (ValueError, RecursionError):
        listed = None
    if list(as_dict(listed)) != ["state.pt"]:
        raise _damaged(where, "manifest.json does not name state.pt alone")
    content(path / "state.pt", where, LARGEST)
    try:
        state = checkpoint.decode(read(path)["state.pt"])
    except Damaged as damage:
        raise _damaged(where, str(damage)) from None
    model = as_dict(as_dict(state).get("model"))
    if not model or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in model.items()):
        raise _damaged(where, "state.pt holds no weights")
    if as_dict(state).get("step") != checkpoint.step_of(path):
        raise _damaged(where, "state.pt is of another step")
    return model


def _damaged(where: str, what: str) -> CheckFailed:
    text = f"{where} is damaged: {what}. Remove it and start again with the same --run.dir, or train anew."
    return CheckFailed(text, "checkpoints")


def unlike(one: State, other: State) -> str | None:
    """What keeps two sets of weights from being compared, in words; None when nothing does."""
    if one.keys() != other.keys():
        return f"{sorted(one.keys() ^ other.keys())[0]} is in one of them only"
    for name, tensor in one.items():
        if tensor.shape != other[name].shape or tensor.dtype != other[name].dtype:
            return f"{name} has another shape or dtype"
    return None


def distance(one: State, other: State) -> float:
    """The Euclidean norm of their difference, over all floating-point tensors; inf when some is not finite."""
    parts = [(one[name].double() - other[name].double()).norm() for name in one if one[name].is_floating_point()]
    length = float(torch.stack(parts).norm()) if parts else 0.0
    return length if length == length else float("inf")


def largest_difference(one: State, other: State) -> tuple[float, str]:
    """The largest difference of two numbers, as a part of the largest number of that tensor, and where."""
    found = [(0.0, "")]
    for name, tensor in one.items():
        if tensor.is_floating_point() and tensor.numel():
            scale = max(float(other[name].abs().max()), 1e-12)
            apart = float((tensor.double() - other[name].double()).abs().max()) / scale
            found.append((apart if apart == apart else float("inf"), name))
    return max(found)


def apart_at(mine: Part, wanted: Part, steps: int, rounding: float) -> tuple[float, int, str]:
    """(difference, step, where) of the first step in which the weights differ by more than rounding.

    Or of the last step, with the largest difference of all steps, when there is none.
    """
    largest = 0.0
    for step in range(1, steps + 1):
        got, want = mine.weights(step), wanted.weights(step)
        apart, where = (float("inf"), what) if (what := unlike(got, want)) else largest_difference(got, want)
        if not apart <= rounding:
            return apart, step, where
        largest = max(largest, apart)
    return largest, steps, ""


def same_bits(one: State, other: State) -> bool:
    """Whether two sets of weights are equal to the last bit."""
    return unlike(one, other) is None and all(torch.equal(one[name], other[name]) for name in one)
