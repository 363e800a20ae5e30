"""The same collectives through memory that the ranks of one host share.

The receiver adds straight from the sender's memory into its own tensor; no byte goes through the kernel. Only the
news does: a bell of a few bytes over a Unix socket says "block 3 is there" or "I have read it", so a rank that
waits sleeps in poll() instead of spinning, and sees at once when the other one dies.
"""

import select

import torch
import torch.distributed as dist

from course_lib.collectives.bells import BLOCK, DIRECT, SLOTS, Peer
from course_lib.collectives.connect import PeerError, connect, host, meet, unix_listener
from course_lib.collectives.segments import Segment, Segments
from course_lib.collectives.sockets import SocketTransport
from course_lib.collectives.transport import COMBINE

DIRECT_FROM = 128 * 1024  # bytes from which shared tensors are read in place: waiting for the reader has a price


class SharedTransport(SocketTransport):
    """Shared memory between every two ranks of `group` (None: all ranks), which must run on one host.

    Made by all ranks of the group together, with the process group up; close it, or use it in a `with`.
    timeout  seconds of silence, while a rank is waited for, that make a PeerError

    Any tensor is copied once, block by block, into shared memory, while the receiver already adds the block before.
    A tensor from `empty` is not copied at all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 60.0) -> None:
        super().__init__(group, timeout)
        hosts = meet(group, host())
        if other := [k for k in range(self.size) if hosts[k] != hosts[0]]:
            raise ValueError(
                f"SharedTransport is for ranks of one host: rank 0 runs on {hosts[0][0]}, rank {other[0]} on "
                f"{hosts[other[0]][0]}."
            )
        self._segments = Segments()
        with unix_listener(self.size) as (listener, address):
            self.sockets = connect(listener, address, group, timeout)
        self._peers = {rank: Peer(rank, sock, self._segments) for rank, sock in self.sockets.items()}

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
        if tensor.numel() * tensor.element_size() >= DIRECT_FROM and (place := self._segments.find(tensor)):
            return _SendingDirect(self._peers[to], tensor, *place)
        return _SendingCopies(self._peers[to], tensor)

    def _receiving(self, tensor: torch.Tensor, source: int, op: str | None) -> "_Receiving":
        return _Receiving(self._peers[source], tensor, op)


class _SendingCopies:
    """A message that is copied into the slots, block by block."""

    def __init__(self, peer: Peer, tensor: torch.Tensor) -> None:
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

    def __init__(self, peer: Peer, tensor: torch.Tensor, segment: Segment, offset: int) -> None:
        self.peer, self.segment, self.offset, self.told, self.done = peer, segment, offset, False, False
        self.total = tensor.numel() * tensor.element_size()

    def step(self) -> bool:
        if not self.told:
            self.peer.show(self.segment)
            self.peer.direct_unread += 1
            self.peer.ring(DIRECT, self.segment.number, self.offset, self.total, self.total)
            self.told = True
            return True
        heard = self.peer.direct_unread > 0 and self.peer.listen()
        self.done = self.peer.direct_unread == 0
        return heard or self.done

    def waits(self) -> tuple[int, int, str]:
        words = f"waits until rank {self.peer.rank} has read the {self.total} bytes sent to it"
        return self.peer.sock.fileno(), select.POLLIN, words


class _Receiving:
    """A message on its way in; each block is stored or combined straight from the sender's memory."""

    def __init__(self, peer: Peer, tensor: torch.Tensor, op: str | None) -> None:
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
