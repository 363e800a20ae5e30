"""Checkpoints: written beside, put in place by one rename, so that there is never half of one.

    checkpoints/step_00000115/state.pt          what `state.collect` gathered
    checkpoints/step_00000115/manifest.json     size and sha256 of each file beside it

Order matters: files to disk, manifest to disk, names to disk (fsync of the folder), rename, names to disk again; only
then may an older one go. A disk that lies, a copy that was cut off, a flipped bit: the manifest tells, and the next
older checkpoint is taken.
"""

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from course_lib.train.environment import Environment
from course_lib.train.errors import ConfigError
from course_lib.train.folder import writing
from course_lib.train.manifest import Damaged, read, write_manifest

_NAME = re.compile(r"step_\d{8,}")
_LEFTOVER = re.compile(r"\.(old-)?step_\d{8,}")  # what `write` names what is not whole yet, or no longer


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first. What else lies there (a copy, .DS_Store) is nobody's checkpoint."""
    found = (folder / "checkpoints").glob("step_*")
    return sorted((path for path in found if _NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was made, from its name."""
    return int(path.name.removeprefix("step_"))


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode(state: dict[str, Any]) -> memoryview:
    """The bytes of state.pt. They are a copy: the state may change while they are written."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def save(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write the state of a step, then remove all but the newest `keep`."""
    return write(folder, state["step"], encode(state), keep)


def write(folder: Path, step: int, content: memoryview | bytes, keep: int) -> Path:
    """Put a checkpoint in place (rank 0 only), then remove older ones: `keep` stay, this one included.

    Raises CannotWrite, and then all that were there before are there still.
    """
    place = folder / "checkpoints"
    target = place / f"step_{step:08d}"
    temporary = place / f".{target.name}"
    with writing(f"The checkpoint of step {step}", place):
        place.mkdir(exist_ok=True)
        clear(place)
        try:
            temporary.mkdir()
            _write_file(temporary / "state.pt", content)
            _write_file(temporary / "manifest.json", write_manifest({"state.pt": content}))
            _sync(temporary)
            if target.exists():  # a damaged one that was skipped when the run was continued
                _remove(target)
            temporary.rename(target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room, for status.json
            raise
        _sync(place)
        _read_back(target)
        # Newer ones are damaged, since this launch began before them: they count for nothing, and are written anew.
        older = [path for path in saved(folder) if step_of(path) < step]
        for path in older[: max(0, len(older) - (keep - 1))]:
            _remove(path)
    return target


def _read_back(path: Path) -> None:
    """Before an older one goes, this one must be whole."""
    try:
        read(path)
    except Damaged as damage:
        raise OSError(f"read back, it is not what was written: {damage}") from damage


def clear(place: Path) -> None:
    """Remove what a launch left that was killed while it wrote; other files are not ours."""
    for leftover in place.glob(".*"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover)


def _write_file(path: Path, content: memoryview | bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    shutil.rmtree(path.rename(path.with_name(f".old-{path.name}")))  # half-removed, it must not look like a checkpoint


def load(folder: Path, env: Environment) -> dict[str, Any] | None:
    """The newest valid state, on the CPU of every rank, or None. Rank 0 reads, so nobody else needs to see the disk."""
    content = None
    with env.together():
        if env.first:
            content = newest_valid(folder, env.say)
    content = env.share(content)
    return None if content is None else decode(content)


def newest_valid(folder: Path, warn: Callable[[str], None]) -> bytes | None:
    """state.pt of the newest checkpoint that is whole; each damaged one is named to `warn`. None: there are none.

    Raises ConfigError when there are some and all are damaged: to begin again is for a person to decide.
    """
    reasons = []
    for path in reversed(saved(folder)):
        try:
            content = read(path)["state.pt"]
            decode(content)
            return content
        except Damaged as damage:
            reasons.append(f"{path}: {damage}")
            warn(f"The checkpoint {path} is damaged and is skipped: {damage}.")
    if reasons:
        raise ConfigError(
            f"No checkpoint in {folder / 'checkpoints'} can be read ({'; '.join(reasons)}); "
            "bring one back, or remove that folder to begin at the first step."
        )
    return None


def decode(content: bytes | memoryview) -> dict[str, Any]:
    """The state in the bytes of state.pt, on the CPU. Raises Damaged."""
    try:
        # weights_only: a checkpoint is data; a pickle could run any code.
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file raises whatever its bytes happen to mean
        raise Damaged(f"state.pt cannot be read ({type(error).__name__})") from error
