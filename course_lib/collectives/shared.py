"""The same collectives through memory that the ranks of one host share.

The receiver adds straight from the sender's memory into its own tensor; no byte goes through the kernel. Only the
news does: a bell of a few bytes over a Unix socket says "block 3 is there" or "I have read it", so a rank that
waits sleeps in poll() instead of spinning, and sees at once when the other one dies.
"""

import secrets
import select
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.collectives.segments import Segments, map_file
from course_lib.collectives.sockets import PeerError, SocketTransport, connect, meet
from course_lib.collectives.transport import COMBINE

# Bytes of a block, and blocks that a rank may be ahead of its reader. Two cores that share a cache of 32 MB were best
# with 512 KB: smaller blocks mean more bells, and each may wake a sleeper.
BLOCK = 512 * 1024
SLOTS = 4
DIRECT = 128 * 1024  # bytes from which a tensor in shared memory is read in place: waiting for the reader has a price
_BELL = struct.Struct("<IIQQQ")  # kind, segment or count, offset, bytes, bytes of the whole message
_MEMORY, _COPIED, _DIRECT, _COPIES_READ, _DIRECT_READ = range(5)
_ROOM = socket.CMSG_SPACE(4 * SLOTS)  # for the descriptors that come with _MEMORY


class SharedTransport(SocketTransport):
    """Shared memory between every two ranks of `group` (None: all ranks), which must run on one host.

    Made by all ranks of the group together, with the process group up; close it, or use it in a `with`.
    timeout  seconds of silence, while a rank is waited for, that make a PeerError

    Any tensor is copied once, block by block, into shared memory, while the receiver already adds the block before.
    A tensor from `empty` is not copied at all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> None:
        super().__init__(group, timeout)
        hosts = meet(group, _host())
        if other := [k for k in range(self.size) if hosts[k] != hosts[0]]:
            raise ValueError(
                f"SharedTransport is for ranks of one host: rank 0 runs on {hosts[0][0]}, rank {other[0]} on "
                f"{hosts[other[0]][0]}."
            )
        self._segments = Segments()
        with _listener(self.size) as (listener, address):
            self.sockets = connect(listener, address, group, timeout)
        self._peers = {rank: _Peer(rank, sock, self._segments) for rank, sock in self.sockets.items()}

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat tensor in shared memory, with whatever values; views of it are sent without a copy.

        It stays valid after `close`. Once no tensor uses the memory, the next call may get it.
        """
        if not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
            raise ValueError(f"numel={numel!r}: give a whole number of elements, 0 or more.")
        if self._broken:
            raise PeerError(f"rank {self.rank} cannot use its SharedTransport any more: {self._broken}.")
        memory = self._segments.borrow(numel * dtype.itemsize)[1]
        return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def close(self) -> None:
        """Close all connections and let go of the shared memory."""
        super().close()
        self._peers.clear()
        self._segments.close()

    def _sending(self, tensor: torch.Tensor, to: int) -> "_SendingCopies | _SendingDirect":
        if tensor.numel() * tensor.element_size() >= DIRECT and (place := self._segments.find(tensor)):
            return _SendingDirect(self._peers[to], tensor, *place)
        return _SendingCopies(self._peers[to], tensor)

    def _receiving(self, tensor: torch.Tensor, source: int, op: str | None) -> "_Receiving":
        return _Receiving(self._peers[source], tensor, op)


class _Peer:
    """The connection to one rank: bells both ways, its memory as far as it has shown it, and slots for blocks."""

    def __init__(self, rank: int, sock: socket.socket, segments: Segments) -> None:
        self.rank, self.sock, self._segments = rank, sock, segments
        self.inbox: deque[tuple[int, int, int, int, int]] = deque()  # bells: what is to be read, and where it lies
        self.copies_unread = self.direct_unread = 0  # of what went to it
        self._read = 0  # blocks of its that were read here and not yet reported
        self._slots: tuple | None = None
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
            if kind not in (_COPIES_READ, _DIRECT_READ):  # who has left does not miss these
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
        if kind == _MEMORY:
            self.theirs[number] = map_file(self._files.popleft())
        elif kind == _COPIES_READ:
            self.copies_unread -= number
        elif kind == _DIRECT_READ:
            self.direct_unread -= number
        else:
            self.inbox.append((kind, number, offset, nbytes, total))

    def gone(self) -> PeerError:
        """The error that says so."""
        return PeerError(f"rank {self.rank} has closed its connection.")

    def show(self, segment) -> None:
        """Let the peer map the segment, once."""
        if segment.number not in self._shown:
            self._shown.add(segment.number)
            self.ring(_MEMORY, segment.number, file=segment.file)

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
        self.ring(_COPIED, segment.number, at, size, total)

    def have_read(self, kind: int) -> None:
        """Tell that a message or block was read; of blocks only every so many, in time for the sender to go on."""
        if kind == _DIRECT:
            self.ring(_DIRECT_READ, 1)
            return
        self._read += 1
        if self._read == SLOTS // 2:
            self.ring(_COPIES_READ, self._read)
            self._read = 0


class _SendingCopies:
    """A message that is copied into the slots, block by block."""

    def __init__(self, peer: _Peer, tensor: torch.Tensor) -> None:
        self.peer, self.tensor, self.sent, self.done = peer, tensor, 0, False
        self.total, self.part = tensor.numel() * tensor.element_size(), BLOCK // tensor.element_size()

    def step(self) -> bool:
        if self.peer.copies_unread == SLOTS and not self.peer.listen():
            return False
        if self.peer.copies_unread < SLOTS:
            small = self.total <= BLOCK
            self.peer.write(self.tensor if small else self.tensor[self.sent : self.sent + self.part], self.total)
            self.sent += self.part
            self.done = self.sent >= self.tensor.numel()
        return True

    def waits(self) -> tuple[int, int, str]:
        words = f"waits to send to rank {self.peer.rank}, which has not read what was sent before"
        return self.peer.sock.fileno(), select.POLLIN, words


class _SendingDirect:
    """A message that the receiver reads where it lies."""

    def __init__(self, peer: _Peer, tensor: torch.Tensor, segment, offset: int) -> None:
        self.peer, self.done = peer, False
        self.total = tensor.numel() * tensor.element_size()
        peer.show(segment)
        peer.direct_unread += 1
        peer.ring(_DIRECT, segment.number, offset, self.total, self.total)

    def step(self) -> bool:
        heard = self.peer.direct_unread > 0 and self.peer.listen()
        self.done = self.peer.direct_unread == 0
        return heard or self.done

    def waits(self) -> tuple[int, int, str]:
        words = f"waits until rank {self.peer.rank} has read the {self.total} bytes sent to it"
        return self.peer.sock.fileno(), select.POLLIN, words


class _Receiving:
    """A message on its way in; each block is stored or combined straight from the sender's memory."""

    def __init__(self, peer: _Peer, tensor: torch.Tensor, op: str | None) -> None:
        self.peer, self.tensor, self.op, self.done = peer, tensor, op, False
        self.total, self.arrived = tensor.numel() * tensor.element_size(), 0

    def step(self) -> bool:
        if not self.peer.inbox:
            return self.peer.listen()
        kind, number, offset, nbytes, total = self.peer.inbox.popleft()
        if total != self.total:
            raise PeerError(
                f"rank {self.peer.rank} sends {total} bytes where {self.total} are expected: all ranks must call the "
                "same collective with tensors of the same length and dtype."
            )
        size = self.tensor.element_size()
        theirs = torch.frombuffer(
            self.peer.theirs[number], dtype=self.tensor.dtype, count=nbytes // size, offset=offset
        )
        first = self.arrived // size
        mine = self.tensor if nbytes == total else self.tensor[first : first + nbytes // size]
        if self.op is None:
            mine.copy_(theirs)
        else:
            COMBINE[self.op](mine, theirs)
        self.peer.have_read(kind)
        self.arrived += nbytes
        self.done = self.arrived == total
        return True

    def waits(self) -> tuple[int, int, str]:
        words = f"waits for rank {self.peer.rank}, from which {self.arrived} of {self.total} bytes have arrived"
        return self.peer.sock.fileno(), select.POLLIN, words


def _host() -> tuple[str, str]:
    """(name, something that no other running host has)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else socket.gethostname()


@contextmanager
def _listener(ranks: int) -> Iterator[tuple[socket.socket, str]]:
    """A listening Unix socket and its address. On Linux that is no file; elsewhere one in a folder that goes again."""
    listener, name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"course-{secrets.token_hex(16)}"
    with nullcontext() if sys.platform == "linux" else tempfile.TemporaryDirectory(prefix="course-") as folder:
        address = f"\0{name}" if folder is None else f"{folder}/meet"
        listener.bind(address)
        listener.listen(ranks)
        yield listener, address
