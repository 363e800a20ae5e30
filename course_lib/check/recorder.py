"""Observers that make races show every time, however quick the machine: see `course_lib.launch.watch.observers`."""

import torch

from course_lib.collectives.tracked import Recorder

__all__ = ["Handles", "InFlight", "Recorder", "poison"]


def poison(phase: str, op: str, peer: int | None, buffer: torch.Tensor) -> None:
    """Fill a buffer with NaN when a receive into it starts: whoever reads it before its wait() finds NaN."""
    if phase == "start" and op in ("recv", "irecv") and buffer.is_floating_point():
        buffer.fill_(float("nan"))


class Handles:
    """Follows each send and receive of a rank, numbered from 0, from its call to its wait().

    compare  also look whether the tensor of a send is still the same at its wait(); costs a copy
    """

    def __init__(self, compare: bool) -> None:
        self.touched: list[int] = []
        self._compare, self._count = compare, 0
        self._open: list[tuple[int, str, int | None, torch.Tensor, bytes]] = []

    @property
    def open(self) -> list[int]:
        """The calls that are not over."""
        return [number for number, *_ in self._open]

    def __call__(self, phase: str, op: str, peer: int | None, buffer: torch.Tensor) -> None:
        compare = self._compare and op in ("send", "isend")
        if phase == "start":
            self._open.append((self._count, op, peer, buffer, _bits(buffer) if compare else b""))
            self._count += 1
            return
        for entry in self._open:
            number, of, other, tensor, before = entry
            if tensor is buffer and (of, other) == (op, peer):
                self._open.remove(entry)
                if compare and _bits(buffer) != before:
                    self.touched.append(number)
                return


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().numpy().tobytes()  # NaN equals itself here


class InFlight:
    """Follows the collectives of a rank that work in place on one tensor: `course_lib.launch.watch.in_place`.

    touched  those, numbered from 0, whose tensor the rank itself changed before their wait(). What is seen is the
             tensor's version, which every operation in place raises, on the tensor or on a view, and no collective
             but for the division of ReduceOp.AVG.
    """

    def __init__(self) -> None:
        self.touched: list[int] = []
        self._open: list[tuple[int, torch.Tensor, int]] = []
        self._count = 0

    def __call__(self, phase: str, op: str, changes: int, tensor: torch.Tensor) -> None:
        if phase == "start":
            self._open.append((self._count, tensor, tensor._version + changes))
            self._count += 1
            return
        for entry in self._open:
            number, other, version = entry
            if other is tensor:
                self._open.remove(entry)
                if tensor._version > version:
                    self.touched.append(number)
                return
