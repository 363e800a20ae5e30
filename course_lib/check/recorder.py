"""Observers that make races show every time, however quick the machine: see `course_lib.launch.watch.observers`."""

import torch

from course_lib.collectives.tracked import _Recorder as Recorder

__all__ = ["Recorder", "Touched", "poison"]


def poison(phase: str, op: str, peer: int | None, buffer: torch.Tensor) -> None:
    """Fill a buffer with NaN when a receive into it starts: whoever reads it before its wait() finds NaN."""
    if phase == "start" and op in ("recv", "irecv") and buffer.is_floating_point():
        buffer.fill_(float("nan"))


class Touched:
    """Finds sends whose tensor changed between isend and its wait(). `found`: their numbers among this rank's sends."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._sends = 0
        self._open: list[tuple[int, int | None, torch.Tensor, bytes]] = []

    def __call__(self, phase: str, op: str, peer: int | None, buffer: torch.Tensor) -> None:
        if op not in ("send", "isend"):
            return
        if phase == "start":
            self._open.append((self._sends, peer, buffer, _bits(buffer)))
            self._sends += 1
            return
        for entry in self._open:
            number, to, tensor, before = entry
            if tensor is buffer and to == peer:
                self._open.remove(entry)
                if _bits(buffer) != before:
                    self.found.append(number)
                return


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().numpy().tobytes()  # NaN equals itself here
