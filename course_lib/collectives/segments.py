"""Pieces of memory that other processes of this host can map: no name anywhere, so nothing stays after kill -9."""

import bisect
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass, field

import torch

_PAGE = mmap.PAGESIZE


@dataclass
class Segment:
    """One piece: `file` is the descriptor by which another process maps it, `at` its address in this one."""

    number: int
    file: int
    nbytes: int
    memory: mmap.mmap
    at: int = 0
    user: weakref.ref | None = None  # of the memory's last borrower

    @property
    def free(self) -> bool:
        """Nobody here has a tensor in it any more."""
        return self.user is not None and self.user() is None


@dataclass
class Segments:
    """All pieces of one rank. Memory that a tensor has left is lent again; the system gets it when all is closed."""

    made: list[Segment] = field(default_factory=list)
    _places: list[tuple[int, int]] = field(default_factory=list)  # (address, number), sorted

    def borrow(self, nbytes: int) -> tuple[Segment, memoryview]:
        """A segment of at least `nbytes`, and its memory: in use while that view, or a tensor on it, lives."""
        size = max(-(-nbytes // _PAGE), 1) * _PAGE
        fitting = [s for s in self.made if s.free and size <= s.nbytes <= 2 * size]
        segment = min(fitting, key=lambda s: s.nbytes) if fitting else self._new(size)
        view = memoryview(segment.memory)  # a tensor on it keeps it alive, and it keeps the mapping
        segment.user = weakref.ref(view)
        if not segment.at:
            segment.at = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
            bisect.insort(self._places, (segment.at, segment.number))
        return segment, view

    def find(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment that the contiguous tensor lies in, and its offset there in bytes."""
        at = tensor.data_ptr()
        place = bisect.bisect_right(self._places, (at, len(self.made))) - 1
        if place < 0:
            return None
        segment = self.made[self._places[place][1]]
        return (segment, at - segment.at) if at - segment.at < segment.nbytes else None

    def close(self) -> None:
        """Let go of the descriptors; tensors that are still in use keep their memory."""
        for segment in self.made:
            os.close(segment.file)
        self.made, self._places = [], []

    def _new(self, size: int) -> Segment:
        file = new_file(size)
        segment = Segment(len(self.made), file, size, mmap.mmap(file, size))
        self.made.append(segment)
        return segment


def new_file(size: int) -> int:
    """Descriptor of `size` zero bytes that no path leads to."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("course", os.MFD_CLOEXEC)
    else:  # macOS: a temporary file, whose name is gone before anybody sees it
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


def map_file(file: int) -> memoryview:
    """Another rank's segment; the descriptor is closed."""
    try:
        return memoryview(mmap.mmap(file, os.fstat(file).st_size))
    finally:
        os.close(file)
