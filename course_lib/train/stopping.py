"""Signals ask the loop to stop; the loop agrees with the other ranks, saves, and ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = {name: getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)}


class StopRequest:
    """Which signal told this rank to stop; 0: none did."""

    def __init__(self) -> None:
        self.number = 0

    def note(self, number: int, _frame: object = None) -> None:
        """The signal handler.

        Launchers repeat signals, so only the first counts and none interrupts a step.
        """
        self.number = self.number or number


def describe(numbers: list[int]) -> str | None:
    """From what each rank received to why the run stops.

    >>> describe([0, 15, 15])
    'rank 1 received SIGTERM'
    >>> describe([0, 0]) is None
    True
    """
    return next((f"rank {rank} received {signal.Signals(n).name}" for rank, n in enumerate(numbers) if n), None)


def leave_to_the_rank(_worker: int) -> None:
    """For a loader process: Slurm signals the whole group, but the rank decides when to stop, and needs its data.

    A loader ends when its rank says so or is gone.
    """
    for number in SIGNALS.values():
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and SIGUSR1 into a request while the block runs (main thread only)."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in SIGNALS.values()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
