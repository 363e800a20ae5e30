"""The run folder: made or found again, locked, and refused when it belongs to another configuration.

Only rank 0 touches it, but for status.json, where a rank that fails says so itself.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from course_lib.train.errors import CannotWrite, ConfigError


@dataclass(frozen=True)
class RunConfig:
    """How the run is run. None of these but the seed changes what is computed."""

    dir: Path | None = None
    """The run folder. Started again with the same folder, the run continues. Default: runs/RECIPE-TIME."""
    seed: int = 0
    """Of the first weights, the data order, dropout and augmentation."""
    log_every: int = 1
    """Steps between two lines of metrics.jsonl; signals are looked at then, too."""
    save_every: int = 0
    """Steps between two checkpoints, beside the one at the end of each epoch (0: only that)."""
    keep: int = 2
    """How many checkpoints are kept."""
    save_in_background: bool = False
    """Training goes on while a checkpoint is written. It is copied first, in memory."""
    stop_after: int | None = None
    """Stop after this step as if by a signal: saved, to be continued."""
    max_minutes: float = 0.0
    """Stop when the processes are so old, as if by a signal; for a machine that is yours for a while. 0: never."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 120.0
    """Seconds after which a collective that some rank never joins is an error."""
    first_timeout: float = 600.0
    """The same until the first step is done: compilers, caches and networks may take their time, on each rank another.
    Never less than timeout."""
    stall: float = 60.0
    """After so many seconds without a step each rank writes where it is into RUN/stalls. Five times as long in the
    first step. 0: never."""


# May differ when a run is continued: they change where and how fast, or how long, not what a step computes.
# (optim.epochs changes the rates of the steps that are left: to train longer is a wish that people have. data.batch
# and data.accumulate change what the number of ranks changes: the order of sums, and BatchNorm's batches.)
HARMLESS = {
    *(f"run.{name}" for name in ("dir", "log_every", "save_every", "keep", "save_in_background", "device")),
    *(f"run.{name}" for name in ("stop_after", "max_minutes", "timeout", "first_timeout", "stall")),
    *(f"data.{name}" for name in ("root", "workers", "eval_batch", "strict", "batch", "accumulate")),
    *(f"measure.{name}" for name in ("tensorboard", "profile_at", "profile_steps", "peak_tflops")),
    *("optim.epochs", "optim.zero", "model.recompute", "ddp.timeout_s"),
}


LONGEST = 1_000_000  # seconds, eleven days: what torch still takes as a timeout, with room to spare


def check(config: RunConfig) -> None:
    """Raise ConfigError for numbers that cannot work."""
    for name, least in (("seed", 0), ("log_every", 1), ("save_every", 0), ("keep", 1), ("stop_after", 1)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"--run.{name} must be at least {least}, but is {value}.")
    if config.seed >= 2**63:
        raise ConfigError(f"--run.seed must be less than 2**63, but is {config.seed}.")
    for name in ("timeout", "first_timeout"):
        if not 0 < (value := getattr(config, name)) <= LONGEST:
            raise ConfigError(f"--run.{name} must be greater than 0 and at most {LONGEST} seconds, but is {value}.")
    for name, unit in (("max_minutes", "minutes"), ("stall", "seconds")):
        if not 0 <= (value := getattr(config, name)) <= LONGEST:
            raise ConfigError(f"--run.{name} must be at least 0 and at most {LONGEST} {unit}, but is {value}.")
    try:
        if config.dir is not None and config.dir.exists() and not config.dir.is_dir():
            raise ConfigError(f"--run.dir {config.dir} is a file, not a folder.")
    except OSError as error:  # a name too long, a folder on the way that may not be read
        raise ConfigError(f"--run.dir {config.dir} cannot be used: {error.strerror or error}.") from error


def default_dir(recipe: str) -> Path:
    """runs/digits-20250102-030405 under the current folder; a number is added when that exists."""
    name = f"{recipe.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [name, *(f"{name}-{i}" for i in range(2, 100))]
    return next(path for path in (Path("runs", candidate) for candidate in candidates) if not path.exists())


@contextmanager
def writing(what: str, where: Path) -> Iterator[None]:
    """A block that writes into the run folder: what the system refuses becomes CannotWrite, one sentence."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(
            f"{what} cannot be written to {where}: {error.strerror or error}. The checkpoints from before are whole: "
            "make room, or make the folder writable, and start again with the same --run.dir."
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file as a whole: a reader sees the old or the new, and so does one after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Options that two configurations (as in config.json) disagree on and that matter.

    >>> differences({"optim": {"lr": 0.1}, "run": {"keep": 2}}, {"optim": {"lr": 0.2}, "run": {"keep": 3}})
    ['optim.lr (0.1 there, 0.2 here)']
    """
    found = []
    for part in sorted(old.keys() | new.keys()):
        before, now = old.get(part, {}), new.get(part, {})
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name) and f"{part}.{name}" not in HARMLESS:
                found.append(f"{part}.{name} ({before.get(name)} there, {now.get(name)} here)")
    return found


def lock(path: Path) -> IO[str]:
    """Hold the folder until the process ends, however it ends. Keep what is returned.

    A POSIX lock: the kernel drops it with its process, kill -9 included, and loader processes do not inherit
    it.
    """
    file = (path / ".lock").open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"Another launch is training in {path} right now; wait for it, or use another --run.dir."
        ) from None
    return file


def is_locked(path: Path) -> bool:
    """Whether some other process is training in this folder."""
    if not (path / ".lock").exists():
        return False
    try:
        lock(path).close()
    except ConfigError:
        return True
    return False


def open_folder(path: Path, content: dict[str, Any]) -> IO[str]:
    """Make the folder, or take an old one of the same configuration; `content` is for config.json.

    Returns the lock. Raises ConfigError, and then nothing was written.
    """
    existed = path.is_dir()
    if existed and any(path.iterdir()) and not (path / "config.json").exists():
        strangers = [entry.name for entry in path.iterdir() if entry.name != ".lock"]
        if strangers:
            raise ConfigError(f"--run.dir {path} is not empty and holds no run (it has {sorted(strangers)[0]}).")
    if existed and (path / "config.json").exists():
        refuse_other(path, content)
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = lock(path)
        if existed and (path / "config.json").exists():
            refuse_other(path, content)  # again: before the lock was ours, somebody may have written
        write_json(path / "config.json", content)
    except OSError as error:
        raise ConfigError(f"The run folder {path} cannot be written: {error.strerror or error}.") from error
    return held


def refuse_other(path: Path, content: dict[str, Any]) -> None:
    """Raise ConfigError when the folder holds a run of another configuration, or of other data."""
    try:
        old = json.loads((path / "config.json").read_text())
        found = differences(old["config"], content["config"])
        if old["data"]["name"] != content["data"]["name"]:
            found.append(f"the data opened ({old['data']['name']} there, {content['data']['name']} here)")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be read as the configuration of a run.") from error
    if found:
        raise ConfigError(
            f"{path} holds a run of another configuration, which differs in {'; '.join(found)}; "
            "use the same options to continue it, or another --run.dir."
        )
