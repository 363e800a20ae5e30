"""The news between two ranks that share memory: small bells over a Unix socket, and the slots for copied blocks."""

import socket
import struct
from collections import deque

import torch

from course_lib.collectives.connect import PeerError
from course_lib.collectives.segments import Segment, Segments, map_file

# Bytes of a block, and blocks that a rank may be ahead of its reader. Two cores that share a cache of 32 MB were best
# with 512 KB: smaller blocks mean more bells, and each may wake a sleeper.
BLOCK = 512 * 1024
SLOTS = 4

_BELL = struct.Struct("<IIQQQ")  # kind, segment or count, offset, bytes, bytes of the whole message
MEMORY, COPIED, DIRECT, COPIES_READ, DIRECT_READ = range(5)
_ROOM = socket.CMSG_SPACE(4 * SLOTS)  # for the descriptors that come with MEMORY


class Peer:
    """The connection to one rank: bells both ways, its memory as far as it has shown it, and slots for blocks."""

    def __init__(self, rank: int, sock: socket.socket, segments: Segments) -> None:
        self.rank, self.sock, self._segments = rank, sock, segments
        self.inbox: deque[tuple[int, int, int, int, int]] = deque()  # bells: what is to be read, and where it lies
        self.copies_unread = self.direct_unread = 0  # of what went to it
        self._read = 0  # blocks of its that were read here and not yet reported
        self._slots: tuple[Segment, memoryview] | None = None
        self._next = 0
        self._shown: set[int] = set()  # my segments that it has mapped
        self.theirs: dict[int, memoryview] = {}
        self._heard, self._files = b"", deque()

    def ring(self, kind: int, number: int, offset: int = 0, nbytes: int = 0, total: int = 0, file: int = -1) -> None:
        """Send one bell. The socket's buffer holds many more than can be under way."""
        message = _BELL.pack(kind, number, offset, nbytes, total)
        try:
            if file >= 0:
                socket.send_fds(self.sock, [message], [file])
            else:
                self.sock.send(message)
        except OSError as error:
            if kind not in (COPIES_READ, DIRECT_READ):  # who has left does not miss these
                raise self.gone() from error

    def listen(self) -> bool:
        """Take in the bells that have come; False when there is none."""
        try:
            data, extra, _, _ = self.sock.recvmsg(64 * _BELL.size, _ROOM)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.gone() from error
        if not data:
            raise self.gone()
        for _, _, files in extra:
            self._files.extend(struct.unpack(f"{len(files) // 4}i", files))
        self._heard += data
        whole = len(self._heard) // _BELL.size * _BELL.size
        for bell in _BELL.iter_unpack(self._heard[:whole]):
            self._take(*bell)
        self._heard = self._heard[whole:]
        return True

    def _take(self, kind: int, number: int, offset: int, nbytes: int, total: int) -> None:
        if kind == MEMORY:
            self.theirs[number] = map_file(self._files.popleft())
        elif kind == COPIES_READ:
            self.copies_unread -= number
        elif kind == DIRECT_READ:
            self.direct_unread -= number
        else:
            self.inbox.append((kind, number, offset, nbytes, total))

    def gone(self) -> PeerError:
        """The error that says so."""
        return PeerError(f"rank {self.rank} has closed its connection.")

    def show(self, segment: Segment) -> None:
        """Let the peer map the segment, once."""
        if segment.number not in self._shown:
            self._shown.add(segment.number)
            self.ring(MEMORY, segment.number, file=segment.file)

    def write(self, part: torch.Tensor, total: int) -> None:
        """Copy a block into the next slot, and ring."""
        if self._slots is None:
            self._slots = self._segments.borrow(BLOCK * SLOTS)
            self.show(self._slots[0])
        segment, memory = self._slots
        at, size = self._next * BLOCK, part.numel() * part.element_size()
        torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=at).copy_(part)
        self._next = (self._next + 1) % SLOTS
        self.copies_unread += 1
        self.ring(COPIED, segment.number, at, size, total)

    def have_read(self, kind: int) -> None:
        """Tell that a message or block was read; of blocks only every so many, in time for the sender to go on."""
        if kind == DIRECT:
            self.ring(DIRECT_READ, 1)
            return
        self._read += 1
        if self._read == SLOTS // 2:
            self.ring(COPIES_READ, self._read)
            self._read = 0
