"""Notices that no step ends any more, and lets every rank write down where it is, before time-outs end the run.

    RUN/stalls/step_00000007/rank_1.txt     the stack of each thread of rank 1
    RUN/stalls/step_00000007/rank_1.json    its last collectives: torch's flight recorder

In data parallel training all ranks stop when one does, so each watches only itself. Rank 0 then compares what the
ranks wrote, and names the one that the others wait for.
"""

import faulthandler
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from course_lib.train import flight
from course_lib.train.environment import speak

FIRST = 5  # the first step may take so many times as long
PATIENCE = 3.0  # seconds that rank 0 gives the others to write


class Heartbeat:
    """A thread that wakes now and then and looks when the last `beat` was; `limit` in seconds, 0: never."""

    def __init__(self, folder: Path, rank: int, world_size: int, limit: float, timeout: float) -> None:
        self.folder, self.rank, self.world_size, self.limit, self.timeout = folder, rank, world_size, limit, timeout
        self.step: int | None = None  # None until the first one is done
        self.at = time.monotonic()
        self.over = threading.Event()

    def beat(self, step: int) -> None:
        """A step is done. After the first one nothing is new any more: collectives get their ordinary time-out."""
        if self.step is None:
            dist.set_timeout(timedelta(seconds=self.timeout))
        self.step, self.at = step, time.monotonic()

    def watch(self) -> None:
        """What the thread does: report each stall once."""
        reported = None
        while not self.over.wait(min(1.0, self.limit / 4)):
            at, step = self.at, self.step
            limit = self.limit * (FIRST if step is None else 1)
            if time.monotonic() - at > limit and reported != at:
                reported = at
                self._report(step or 0, limit)

    def _report(self, step: int, seconds: float) -> None:
        place = self.folder / "stalls" / f"step_{step:08d}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with (place / f"rank_{self.rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            (place / f"rank_{self.rank}.json").write_text(flight.dump())
        except OSError as error:
            speak(f"rank {self.rank}: no step for {seconds:g} s, and {place} cannot be written: {error}.", error=True)
            return
        if self.rank == 0:
            self.over.wait(PATIENCE)
            guess = flight.who_is_missing(place, self.world_size)
            speak(f"No step for {seconds:g} s after step {step}: {guess}. Where each rank is: {place}", error=True)


@contextmanager
def heartbeat(folder: Path, rank: int, world_size: int, limit: float, timeout: float) -> Iterator[Heartbeat]:
    """A Heartbeat whose thread lives as long as the block."""
    heart = Heartbeat(folder, rank, world_size, limit, timeout)
    thread = threading.Thread(target=heart.watch, name="heartbeat", daemon=True)
    if limit:
        thread.start()
    try:
        yield heart
    finally:
        heart.over.set()
