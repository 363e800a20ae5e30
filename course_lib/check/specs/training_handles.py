"""In the rank: what it gives to broadcast, and what it does with the handles of its calls beside wait()."""

import gc
import sys

import torch
from torch import nn

from course_lib.launch.watch import WatchedWork

OFTEN = 100  # who asks for the state of a handle as often between two gradients waits for it
ASKS = "called is_completed() again and again inside backward, until it was stopped there"


class Asked:
    """Counts how often handles were asked since the last gradient came.

    ready  for each step, the gradients that have come
    """

    def __init__(self, ready: list[list]) -> None:
        self._ready, self._since, self._count = ready, (0, 0), 0

    def __call__(self) -> None:
        """A handle was asked, and is not over. Raises RuntimeError when that happens too often in backward."""
        now = len(self._ready), len(self._ready[-1])
        self._count = self._count + 1 if now == self._since else 1
        self._since = now
        if self._count > OFTEN and _inside_backward():
            raise RuntimeError(f"{ASKS}.")


def _inside_backward() -> bool:
    frame = sys._getframe(1)
    while frame and frame.f_code.co_name != "_engine_run_backward":  # torch.autograd.graph: hooks run below it
        frame = frame.f_back
    return frame is not None


class Spread:
    """Says of each broadcast which tensor it got: [step, kind], an observer of `course_lib.launch.watch.in_place`.

    found  kind: "gradient", "learned", "frozen", "buffer", or "" for any other tensor, such as a copy; no more is told
           of the calls before the first step
    ready  for each step, the gradients that have come
    """

    def __init__(self, module: nn.Module, ready: list[list]) -> None:
        self.found: list[tuple[int, str]] = []
        self._module, self._ready = module, ready

    def __call__(self, phase: str, op: str, changes: int, tensor: torch.Tensor) -> None:
        """A collective starts, or is over."""
        if phase == "start" and op == "broadcast" and self._ready:
            self.found.append((len(self._ready) - 1, self._kind(tensor.data_ptr())))

    def _kind(self, place: int) -> str:
        for p in self._module.parameters():
            if p.data_ptr() == place:
                return "learned" if p.requires_grad else "frozen"
            if p.grad is not None and p.grad.data_ptr() == place:
                return "gradient"
        return "buffer" if any(b.data_ptr() == place for b in self._module.buffers()) else ""


def count_from_here() -> None:
    """Leave out of `alive` what is there now: to look through all that torch has brought takes longer than a case."""
    gc.freeze()


def alive() -> int:
    """How many handles have come since, and are still there."""
    return sum(type(thing) is WatchedWork for thing in gc.get_objects())
