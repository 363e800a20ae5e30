"""Checkpoints: written beside, put in place by one rename, so that there is never half of one.

    checkpoints/step_00000115/state.pt      {"step", "world_size", "model", "optimizer"}

Randomness and data order are functions of the step, so nothing more is needed to go on with the same bits.
"""

import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from course_lib.train.environment import Environment
from course_lib.train.errors import ConfigError

_NAME = re.compile(r"step_\d{8,}")
_LEFTOVER = re.compile(r"\.(old-)?step_\d{8,}")  # what `save` names what is not whole yet, or no longer


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. What else lies there (a copy, .DS_Store) is nobody's checkpoint."""
    found = (folder / "checkpoints").glob("step_*")
    return sorted(path for path in found if _NAME.fullmatch(path.name) and (path / "state.pt").exists())


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write the state of a step (rank 0 only), then remove all but the newest `keep`."""
    place = folder / "checkpoints"
    place.mkdir(exist_ok=True)
    for leftover in place.glob(".*"):  # of a launch that was killed while it wrote; other files are not ours
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover)
    target = place / f"step_{state['step']:08d}"
    if target.exists():
        return target
    temporary = place / f".{target.name}"
    temporary.mkdir()
    torch.save(state, temporary / "state.pt")
    _sync(temporary / "state.pt")
    _sync(temporary)
    temporary.rename(target)
    _sync(place)
    for old in saved(folder)[:-keep]:
        doomed = old.rename(place / f".old-{old.name}")  # half-removed, it must not look like a checkpoint
        shutil.rmtree(doomed)
    return target


def load(folder: Path, env: Environment) -> dict[str, Any] | None:
    """The newest state, on the CPU of every rank, or None. Rank 0 reads.

    So nobody else needs to see the disk.
    """
    content = None
    with env.together():
        if env.first and saved(folder):
            newest = saved(folder)[-1]
            content = (newest / "state.pt").read_bytes()
            try:
                _decode(content)
            except Exception as error:  # a broken file raises whatever its bytes happen to mean
                raise ConfigError(
                    f"The checkpoint {newest} cannot be read ({type(error).__name__}); "
                    "remove it to continue from the one before."
                ) from error
    content = env.share(content)
    return None if content is None else _decode(content)


def _decode(content: bytes) -> dict[str, Any]:
    # weights_only: a checkpoint is data; a pickle could run any code.
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
