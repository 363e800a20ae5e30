"""`run`: call a function on N real ranks and give back what they returned, printed and sent."""

import json
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.launch import arguments, diagnose, trace
from course_lib.launch.errors import RunError, RunInterrupted
from course_lib.launch.follow import Ranks
from course_lib.launch.pickling import cell_names, cell_sources, pickle_call
from course_lib.launch.printed import DISK, Printed, last_words
from course_lib.launch.result import Result
from course_lib.launch.story import story
from course_lib.launch.supervise import Interrupt, Supervisor, exclusive

_START_LIMIT = 120.0
_LOOK = 0.02  # seconds between two looks at processes and files; at what the ranks say of themselves: 0.005


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: tuple = (),
    timeout: float = 60,
    backend: str = "gloo",
    *,
    nodes: int = 1,
    start: str = "auto",
    watch: bool = True,
    quiet: bool = False,
) -> Result:
    """Call `fn(*args)` on `ranks` processes started by torchrun; the process group is up when it is called.

    fn       any function, also one from a notebook cell. What it returns comes back in `Result.results[rank]`.
    timeout  seconds for the function on all ranks. A run in which all ranks provably wait for each other ends
             after about 2 s.
    backend  "gloo" for CPU tensors, "nccl" for GPUs
    nodes    start the ranks by this many torchruns, as if each were another machine: the first gets the ranks
             0 to ranks/nodes - 1, and so on. (Here they all share this machine and its memory.)
    start    "fork": ranks are forked by a torchrun that has torch imported already (fast; Linux);
             "torchrun": a plain `torchrun` command (slow start; any system; needed for NCCL); "auto" chooses.
             "direct": forked without torchrun (Linux), for a judge that starts many small groups
    watch    False: do not record messages (saves a few microseconds a call)
    quiet    True: do not print what the ranks print; it is in `Result.output`

    Raises RunError (a rank failed, or a hang), RunInterrupted (Ctrl-C), TypeError or ValueError (bad arguments).
    """
    start = arguments.check(fn, ranks, args, timeout, backend, start, nodes)
    call = pickle_call(fn, args)
    with exclusive() as (current, interrupt):
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=current.folder))
        try:
            this = _Run(current, interrupt, folder, ranks, timeout, quiet)
            if str(getattr(fn, "__module__", "")).startswith("course_lib."):
                this.module = fn.__module__
            return this.go(call, backend, start, watch, nodes)
        finally:
            if current.alive():
                current.end()
            shutil.rmtree(folder, ignore_errors=True)


class _Run:
    """One run, seen from the kernel."""

    def __init__(self, current: Supervisor, interrupt: Interrupt, folder: Path, ranks: int, timeout: float,
                 quiet: bool) -> None:  # fmt: skip
        self.current, self.interrupt, self.folder = current, interrupt, folder
        self.count, self.timeout, self.again = ranks, timeout, False
        self.module: str | None = None  # where the function is from, when it is a part of the course
        self.ranks, self.printed = Ranks(folder, ranks, current), Printed(folder, ranks, quiet)

    def go(self, call: bytes, backend: str, start: str, watch: bool, nodes: int) -> Result:
        (self.folder / "call.pickle").write_bytes(call)
        plan = {"backend": backend, "watch": watch, "cells": cell_names(), "sources": cell_sources()}
        plan["path"] = list(map(str, sys.path))
        plan["group_timeout"] = self.timeout + 60  # ours comes first: it can say who waits for whom
        plan["meet"] = f"file://{self.folder}/store" if start == "direct" else None  # None: where torchrun says
        (self.folder / "plan.json").write_text(json.dumps(plan))
        began = time.monotonic()
        self.start(start, nodes)
        looked = 0.0
        while True:
            ended = self.current.poll(0.005) is not None
            states = [header.state for header in self.ranks.headers()]
            if all(state == trace.RETURNED for state in states):
                return self.collect()
            if self.interrupt.count:
                self.stop_interrupted()
            failed = ended or trace.RAISED in states
            if not failed and time.monotonic() - looked < _LOOK:
                continue
            looked = time.monotonic()
            self.printed.show()
            self.ranks.look()
            if ended and self.port_was_taken():
                self.current.end()
                self.start(start, nodes)
                continue
            if failed or self.ranks.exit_codes:
                self.ranks.settle()
                self.fail()
            if (rank := self.printed.flood()) is not None:
                self.fail(f"rank {rank} has printed more than {DISK >> 30} GB")
            self.check_time(began)

    def start(self, start: str, nodes: int) -> None:
        log, place = self.folder / "torchrun_0.log", {"env": arguments.environment(), "cwd": arguments.cwd()}
        if start == "direct":
            self.current.start(start, log=log, **place, ranks=self.count, folder=str(self.folder), module=self.module)
            return
        for number, argv in enumerate(arguments.commands(self.folder, self.count, nodes, start)):
            log = self.folder / f"torchrun_{number}.log"
            self.current.start(start, log=log, **place, argv=argv)

    def port_was_taken(self) -> bool:
        """Somebody else took the meeting point's port between our choice and torchrun's start: choose again, once."""
        if self.again or "EADDRINUSE" not in self.ranks.torchrun_log() or any(self.folder.glob("*.pid")):
            return False
        self.again = True
        for log in self.folder.glob("torchrun_*.log"):
            log.unlink()
        return True

    def check_time(self, began: float) -> None:
        """Raise when the time is up, or as soon as it is clear that nobody will ever move."""
        now = time.monotonic()
        begins = [header.begin for header in self.ranks.headers()]
        if not all(begins):
            if now - began > _START_LIMIT:
                self.fail(f"the ranks had not started after {_START_LIMIT:.0f} s")
            return
        if now - max(begins) > self.timeout:
            deadlock = self.ranks.stuck()
            self.ranks.ask_stacks()
            self.fail(f"not finished after {self.timeout:g} s", deadlock)
        if self.ranks.deadlocked():
            self.fail("deadlock: all ranks wait, and nothing can wake them", True)

    def collect(self) -> Result:
        self.printed.show(last=True)
        seconds = max(header.end - header.begin for header in self.ranks.headers())
        values = [pickle.loads((self.folder / f"rank_{k}.value").read_bytes()) for k in range(self.count)]
        result = Result(values, self.printed.texts(), self.ranks.messages(), seconds, self.ranks.zero())
        self.current.end()  # all values are here: nothing is gained by waiting for each process's own clean end
        self.ranks.close()
        return result

    def stop_interrupted(self) -> None:
        self.ranks.ask_stacks()
        lines = [f"rank {state.rank} {state.words()}" for state in self.ranks.states()]
        self.current.end()
        raise RunInterrupted("Interrupted: all ranks have been stopped.\n" + "\n".join(lines))

    def fail(self, headline: str | None = None, deadlock: bool = False) -> None:
        """End the run and raise what the learner should read."""
        states, messages, zero = self.ranks.states(), self.ranks.messages(), self.ranks.zero()
        self.current.end()
        self.printed.show(last=True)
        output = self.printed.texts()
        guilty = None if headline else diagnose.culprit(states)
        text = story(states, messages, guilty, headline, self.ranks.torchrun_log())
        if guilty and not guilty.error and (said := last_words(output[guilty.rank])):
            text += f"\n\nrank {guilty.rank}'s last words: {said}"
        culprit = guilty.rank if guilty else None
        raise RunError(text, culprit=culprit, messages=messages, output=output, zero=zero, deadlock=deadlock)
