"""Several whole training runs in one process that take turns: each in a thread of its own, one of them awake at a time.

So each contender is an ordinary run from its first step to its last, with whatever it sets up at its start, and still
the runs can be timed in blocks of steps in any order. A sleeping run costs nothing.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

PATIENCE = 1800.0  # seconds that a block, or what comes after the last one, may take


class Run:
    """`train(pause)` calls `pause()` after each of its steps, and sleeps in there until its next turn."""

    def __init__(self, name: str, train: Callable[[Callable[[], None]], Any]) -> None:
        self.name, self.train = name, train
        self.left = 0  # steps until the turn ends
        self.error: BaseException | None = None
        self.ended = False
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.thread.start()

    def turn(self, steps: int) -> None:
        """So many steps, now. Raises what the run raised; RuntimeError when it ends before, or takes too long."""
        self.left = steps
        self._wake()
        if self.ended:
            raise RuntimeError(f"{self.name} ended {self.left} steps too early.")

    def finish(self) -> None:
        """After the last step: let the run come to its end. Raises what it raised, or RuntimeError if it goes on."""
        self.left = 1
        self._wake()
        if not self.ended:
            raise RuntimeError(f"{self.name} takes more steps than it should.")
        self.thread.join(PATIENCE)

    def _wake(self) -> None:
        self.go.release()
        if not self.done.acquire(timeout=PATIENCE):
            raise RuntimeError(f"{self.name} is not done after {PATIENCE:g} seconds.")
        if self.error:
            raise self.error

    def _live(self) -> None:
        self.go.acquire()
        torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps this number for each thread
        try:
            self.train(self._pause)
        except BaseException as error:  # noqa: BLE001  raised by the thread that measures
            self.error = error
        self.ended = True
        self.done.release()

    def _pause(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.done.release()
            self.go.acquire()
