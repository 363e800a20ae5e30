"""What one rank of `run` does: set up, join the process group, call the function, hand over what came of it."""

import contextlib
import faulthandler
import functools
import json
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from course_lib.launch import trace
from course_lib.launch.dying import die_with_parent
from course_lib.launch.pickling import dumps, text_of
from course_lib.launch.watch import Watch

_OURS, _COURSE = str(Path(__file__).parent), str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_START_LIMIT = 120.0  # seconds a rank waits for the others to be forked


class Rank:
    """The life of one rank in the run folder that torchrun's script argument names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.plan = json.loads((folder / "plan.json").read_text())
        self.writer = trace.Writer(folder, self.number)

    def path(self, kind: str) -> Path:
        """File of this rank in the run folder."""
        return self.folder / f"rank_{self.number}.{kind}"

    def prepare(self) -> None:
        """Own output and stack files, default signals, one thread; then wait until all ranks exist."""
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # torchrun's handlers are inherited by a forked rank
        sys.stdout.flush()
        sys.stderr.flush()
        out = os.open(self.path("out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
        stack = self.path("stack").open("w")
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        torch.set_num_threads(1)
        # Where loader workers put their sockets. A folder of its own would be left there: we do not end, we are killed.
        multiprocessing.current_process()._config["tempdir"] = str(self.folder)
        # As in a process that was started anew: forks would all go on with the agent's state. (random does it itself.)
        torch.default_generator.seed()
        numpy.random.seed()
        for name, lines in self.plan["sources"].items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        partial = self.path("pid.partial")
        partial.write_text(str(os.getpid()))
        partial.rename(self.path("pid"))
        # A process that is forked while another thread resolves a name can hang in its own first look-up, so
        # nobody touches the network before all ranks have been forked.
        deadline = time.monotonic() + _START_LIMIT
        while self.count(".pid") < self.world:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of the {self.world} ranks had started after {_START_LIMIT:.0f} s")
            time.sleep(0.005)

    def count(self, ending: str) -> int:
        """How many files of the run folder end so."""
        return sum(path.suffix == ending for path in self.folder.iterdir())

    def label(self, file: str, line: int) -> str:
        """A source position in words. One of the name of a file of the course has its folder, too."""
        name = Path(file).name
        if not file.startswith(_COURSE) and _namesake(name):
            name = f"{Path(file).parent.name}/{name}"
        return f"{self.plan['cells'].get(file) or name}, line {line}"

    def work(self) -> None:
        """Join the group, call the function, write its value."""
        limit = timedelta(seconds=self.plan["group_timeout"])
        place = {"rank": self.number, "world_size": self.world} if self.plan["meet"] else {}
        dist.init_process_group(self.plan["backend"], init_method=self.plan["meet"], timeout=limit, **place)
        dist.barrier()
        if self.plan["watch"]:
            Watch(self.writer, self.label).install()
        # After the wrappers are in place: what the call names, such as a `send` that a cell imported from
        # torch.distributed, is looked up now.
        fn, args = pickle.loads((self.folder / "call.pickle").read_bytes())
        begin = time.monotonic()
        self.writer.state(trace.RUNNING, begin=begin)
        value = fn(*args)
        self.writer.state(trace.RUNNING, end=time.monotonic())
        try:
            data = dumps(value)
        except Exception as error:  # noqa: BLE001 - any __reduce__ may run
            raise TypeError(
                f"rank {self.number} returned a {type(value).__name__}, which cannot be sent back: {error}"
            ) from None
        self.path("value").write_bytes(data)

    def failed(self, error: BaseException) -> None:
        """Write what went wrong, as the learner's own lines."""
        write_error(self.folder, self.number, error, self.label)

    def stay(self) -> None:
        """Wait for the others: a rank that leaves early breaks the connections of its peers.

        Mostly the supervisor ends us here: as soon as all values are there, or because somebody failed.
        """
        while self.count(".end") < self.world:
            time.sleep(0.05)


def write_error(folder: Path, rank: int, error: BaseException, label: Callable[[str, int], str]) -> None:
    """The story of an exception, for the other side; `label` turns a source position into words."""
    everything = traceback.extract_tb(error.__traceback__)
    frames = [f for f in everything if not _hidden(f.filename)]
    # wait() goes from our wrapper straight into C++, without a Python frame of torch
    in_library = bool(frames) and everything[-1].filename.startswith((_TORCH, _COURSE))
    frames = [f for f in frames if not f.filename.startswith(_TORCH)] or frames[-1:]
    told = [{"where": label(f.filename, f.lineno or 0), "function": f.name, "text": f.line or ""} for f in frames]
    if len(told) > 12:  # a recursion without end
        told[6:-6] = [{"where": f"… {len(told) - 12} more …", "function": "", "text": ""}]
    story = {
        "type": type(error).__name__,
        "message": text_of(error),
        "time": time.time(),
        "in_library": in_library,
        "frames": told,
        "causes": _causes(error),
    }
    partial = folder / f"rank_{rank}.error.partial"
    partial.write_text(json.dumps(story))
    partial.rename(folder / f"rank_{rank}.error")


def _causes(error: BaseException) -> list[str]:
    """The exceptions behind this one, and those inside an ExceptionGroup."""
    found = [f"contains {type(e).__name__}: {text_of(e)}" for e in getattr(error, "exceptions", ())]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and len(found) < 10:
        found.append(f"caused by {type(cause).__name__}: {text_of(cause)}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


@functools.cache
def _namesake(name: str) -> bool:
    """Whether a module of the course that was imported here has a file of this name."""
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    return any(file.startswith(_COURSE) and Path(file).name == name for file in files)


def _hidden(file: str) -> bool:
    return file.startswith((_OURS, "<frozen")) or file.endswith("_rank_main.py")


def main(folder: str) -> None:
    """Entry of the script that torchrun starts."""
    try:
        rank = Rank(Path(folder))
    except BaseException as error:
        write_error(Path(folder), int(os.environ["RANK"]), error, lambda file, line: f"{Path(file).name}, line {line}")
        raise
    state = trace.RETURNED
    try:
        rank.prepare()
        rank.work()
    except BaseException as error:  # noqa: BLE001 - SystemExit of a rank is news too
        rank.failed(error)
        state = trace.RAISED
    with contextlib.suppress(ValueError):  # the function may have closed its streams
        sys.stdout.flush()
        sys.stderr.flush()
    rank.writer.state(state)
    if state == trace.RETURNED:
        rank.path("end").touch()
    rank.stay()
