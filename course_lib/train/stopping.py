"""Signals and the clock ask the loop to stop; the loop agrees with the other ranks, saves, and ends."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import active_children

import psutil

from course_lib.launch.dying import die_with_parent

SIGNALS = {name: getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)}
# Beyond all signal numbers: other reasons of a rank, in the same place of the row that all ranks share.
TIME_IS_UP, DISK_TROUBLE = 1000, 1001


class StopRequest:
    """Whether something told this rank to stop: a signal, or that the process is `max_minutes` old (0: any age)."""

    def __init__(self, max_minutes: float = 0.0) -> None:
        self.number = 0  # of the signal; 0: none came
        self.until = psutil.Process().create_time() + 60 * max_minutes if max_minutes else math.inf

    def note(self, number: int, _frame: object = None) -> None:
        """The signal handler.

        Launchers repeat signals, so only the first counts and none interrupts a step.
        """
        self.number = self.number or number

    @property
    def code(self) -> int:
        """What the other ranks are told: the number of a signal, TIME_IS_UP, or 0."""
        return self.number or (TIME_IS_UP if time.time() >= self.until else 0)


def describe(codes: list[int]) -> str | None:
    """From what each rank has to say to why the run stops.

    >>> describe([0, 15, 15])
    'rank 1 received SIGTERM'
    >>> describe([TIME_IS_UP, 0])
    'run.max_minutes are over'
    >>> describe([0, 0]) is None
    True
    """
    others = {TIME_IS_UP: "run.max_minutes are over", DISK_TROUBLE: "the run folder cannot be written"}
    return next(
        (others.get(n) or f"rank {rank} received {signal.Signals(n).name}" for rank, n in enumerate(codes) if n), None
    )


def leave_to_the_rank(_worker: int) -> None:
    """For a loader process: Slurm signals the whole group, but the rank decides when to stop, and needs its data.

    A loader ends when its rank says so or is gone.
    """
    die_with_parent()
    for number in SIGNALS.values():
        signal.signal(number, signal.SIG_IGN)


def end_loaders() -> None:
    """End the loader processes of a rank that fails.

    At its exit Python would send SIGTERM to them, which they leave to the rank, and wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's own handler would raise an error for each
    for loader in active_children():
        loader.kill()


@contextmanager
def listening(max_minutes: float = 0.0) -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT, SIGUSR1 and the time limit into a request while the block runs (main thread only)."""
    request = StopRequest(max_minutes)
    before = {number: signal.signal(number, request.note) for number in SIGNALS.values()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
