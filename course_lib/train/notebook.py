"""`train(...)`: the training loop, started from a notebook cell exactly as from a terminal."""

import shlex
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from course_lib.launch import RunInterrupted, scratch, torchrun
from course_lib.launch.errors import wrapped
from course_lib.train.cli import parse, words
from course_lib.train.config import check
from course_lib.train.display import Live, Progress
from course_lib.train.errors import ConfigError
from course_lib.train.folder import default_dir
from course_lib.train.record import TrainRun
from course_lib.train.said import raised, spoken, tail


class TrainError(RuntimeError):
    """A run that failed: one sentence, then the traceback of the rank that failed first."""

    def _render_traceback_(self) -> list[str]:
        return [wrapped(f"TrainError: {self}")]  # a notebook shows this instead of the frames of this file


def train(
    recipe: str = "digits",
    ranks: int = 2,
    timeout: float | None = None,
    dir: str | Path | None = None,
    restarts: int = 0,
    **options: Any,
) -> TrainRun:
    """Train on `ranks` processes and return the run, by the torchrun command line that is printed first.

    timeout  seconds; then the run is stopped and saved, and TimeoutError is raised
    dir      the run folder; given again, the run continues. Default: a new one, runs/RECIPE-TIME
    restarts  how often all ranks are started again when one has died: torchrun's --max-restarts
    options  as on the command line: **{"optim.lr": 0.1, "data.global_batch": 128}

    Raises ConfigError for what cannot start, TrainError for what fails. The notebook's stop button stops the
    ranks at the end of a step, and saves.
    """
    args, folder = arguments(recipe, ranks, dir, restarts, options)
    return follow(args, ranks, folder, timeout, restarts)


def arguments(
    recipe: str, ranks: int, dir: str | Path | None, restarts: int, options: dict[str, Any]
) -> tuple[list[str], Path]:
    """Check what `train` was given and print the command; what follows torchrun's own options, and the run folder."""
    if not isinstance(recipe, str):
        raise ConfigError(f"The recipe must be a name, for example 'digits', but is {recipe!r}.")
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks must be a whole number of at least 1, but is {ranks!r}.")
    if not isinstance(restarts, int) or restarts < 0:
        raise ConfigError(f"restarts must be a whole number of at least 0, but is {restarts!r}.")
    try:
        Path.cwd()
    except OSError:
        raise ConfigError("The current folder is not there any more; change to another one with %cd.") from None
    folder = Path(dir) if dir is not None else default_dir(recipe)
    line = words(recipe, {**options, "run.dir": folder})
    check(parse(line), ranks)  # what is wrong with the options is said here, before any process starts
    own = [f"--nproc-per-node={ranks}", *([f"--max-restarts={restarts}"] if restarts else [])]
    args = ["-m", "course_lib.train", *line]
    print("$", shlex.join(["torchrun", "--standalone", *own, *args]), flush=True)
    return args, folder


def follow(
    args: list[str], ranks: int, folder: Path, timeout: float | None, restarts: int = 0, live: Live | None = None
) -> TrainRun:
    """Start torchrun, show the run while it goes on (in `live`, or below the cell), and read it back."""
    before, since, live = stamp(folder), time.monotonic(), live or Live()

    def show(always: bool = False) -> None:
        if always or live.due():
            run = TrainRun.read(folder) if stamp(folder) != before else None
            live.show(Progress(run, time.monotonic() - since))

    with tempfile.TemporaryDirectory(prefix="train-", dir=scratch()) as temporary:
        log = Path(temporary) / "output.log"
        show(always=True)
        try:
            torchrun(
                args, ranks=ranks, log=log, on_tick=show, timeout=timeout, restarts=restarts,
                module="course_lib.train.warm",
            )  # fmt: skip
        except KeyboardInterrupt:
            raise interrupted(folder) from None
        except TimeoutError as late:
            raise TimeoutError(f"{late} To continue: train(..., dir={str(folder)!r}).") from None
        finally:
            output = log.read_text(errors="replace") if log.exists() else ""
            if stamp(folder) != before:
                show(always=True)
                with suppress(OSError):  # the log is a convenience; the run itself is complete without it
                    shutil.copy(log, folder / "output.log")
    return judge(folder, before, output)


def interrupted(folder: Path) -> RunInterrupted:
    """What the notebook's stop button leads to, in words."""
    return RunInterrupted(f"Stopped. To continue: train(..., dir={str(folder)!r}).")


def stamp(folder: Path) -> int:
    """When status.json was written last, in ns; 0: never. A change tells that this launch got to its run folder."""
    status = folder / "status.json"
    return status.stat().st_mtime_ns if status.exists() else 0


def judge(folder: Path, before: int, output: str) -> TrainRun:
    """The run when it finished or stopped; otherwise one sentence and the traceback of the culprit."""
    if stamp(folder) == before:
        said = spoken(output)
        text = "\n".join(said)
        if "Traceback (most recent call last)" in text or (text := raised(output)):
            raise TrainError(f"The run failed before its first step.\n\n{text}")
        raise ConfigError(
            said[-1]
            if said
            else ("No rank said a word before it was gone. Was it killed, or does a file of yours call os._exit?")
        )
    run = TrainRun.read(folder)
    if run.status in ("finished", "stopped"):
        return run
    if run.status == "failed":
        raise TrainError(f"The run failed: {run.why}.\n\n{run.details.get('traceback', '')}")
    raise TrainError(f"The run ended without a word at step {run.details.get('step')}: {run.why}.\n\n{tail(output)}")
