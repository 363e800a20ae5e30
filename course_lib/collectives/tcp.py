"""The same collectives over plain TCP sockets.

Each message is its length (8 bytes) and its bytes. Sending and receiving go on at once, in blocks: while the kernel
carries one block, the block before it is added. On one host this is faster than gloo's `send` and `recv`, which
hand each message to another thread and back (docs/ring.md).
"""

import select
import socket
import struct

import torch
import torch.distributed as dist

from course_lib.collectives.connect import PeerError, connect, own_address
from course_lib.collectives.sockets import SocketTransport
from course_lib.collectives.transport import COMBINE

# Bytes that are sent, or received and then added, at a time. On two cores 512 KB and 1 MB took the least CPU time for
# tensors of 1 to 64 MB; 128 KB took a third more at 64 MB. Buffers of the sockets are left to the system, which adapts
# them: setting them to 1 or 4 MB gained nothing that could be told from noise.
BLOCK = 512 * 1024
_LENGTH = struct.Struct("<Q")


class TcpTransport(SocketTransport):
    """A TCP connection between every two ranks of `group` (None: all ranks).

    Made by all ranks of the group together, with the process group up; close it, or use it in a `with`.
    timeout  seconds of silence, while a rank is waited for, that make a PeerError
    address  of this host, where the others reach it. Without it the address from which MASTER_ADDR is reached,
             so that ranks on one host stay on loopback. The port is chosen by the system.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: float = 60.0, address: str | None = None
    ) -> None:
        super().__init__(group, timeout)
        address = address or own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(socket.SOMAXCONN)  # strangers may come, too, and must not keep a rank out
        except OSError as error:
            listener.close()
            raise ValueError(f"address={address!r} is none of this host: {error}.") from None
        self.sockets = connect(listener, listener.getsockname(), group, timeout)
        for sock in self.sockets.values():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._block = memoryview(bytearray(BLOCK))

    def _sending(self, tensor: torch.Tensor, to: int) -> "_Sending":
        return _Sending(self.sockets[to], tensor, to)

    def _receiving(self, tensor: torch.Tensor, source: int, op: str | None) -> "_Receiving":
        return _Receiving(self.sockets[source], tensor, source, op, self._block)


class _Sending:
    """A message on its way out."""

    def __init__(self, sock: socket.socket, tensor: torch.Tensor, to: int) -> None:
        self.sock, self.to, self.done = sock, to, False
        self.bytes = _bytes(tensor)
        self.head = memoryview(_LENGTH.pack(len(self.bytes)))
        self.sent = 0

    def step(self) -> bool:
        try:
            if self.head:
                count = self.sock.sendmsg([self.head, self.bytes[:BLOCK]])
                self.sent, self.head = max(count - len(self.head), 0), self.head[count:]
            else:
                self.sent += self.sock.send(self.bytes[self.sent : self.sent + BLOCK])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerError(
                f"rank {self.to} has closed its connection: {self.sent} of {len(self.bytes)} bytes had been sent to it."
            ) from error
        self.done = self.sent == len(self.bytes)
        return True

    def waits(self) -> tuple[int, int, str]:
        words = f"waits to send to rank {self.to}, which has taken {self.sent} of {len(self.bytes)} bytes"
        return self.sock.fileno(), select.POLLOUT, words


class _Receiving:
    """A message on its way in: stored at once, or combined whenever a block is full."""

    def __init__(
        self, sock: socket.socket, tensor: torch.Tensor, source: int, op: str | None, block: memoryview
    ) -> None:
        self.sock, self.tensor, self.source, self.op, self.done = sock, tensor, source, op, False
        self.total = tensor.numel() * tensor.element_size()
        self.block = block
        self.landing = block[: self.total] if op else _bytes(tensor)
        self.head, self.missing = bytearray(_LENGTH.size), _LENGTH.size
        self.filled = self.combined = 0  # bytes in `landing`; bytes that are in the tensor already

    def step(self) -> bool:
        try:
            count = self._receive()
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone() from error
        if not count:
            raise self._gone()
        arrived = self.combined + self.filled
        if self.op and (self.filled == len(self.landing) or arrived == self.total):
            self._combine()
        self.done = arrived == self.total
        return True

    def _receive(self) -> int:
        if not self.missing:
            count = self.sock.recv_into(self.landing[self.filled :])
            self.filled += count
            return count
        into = [memoryview(self.head)[-self.missing :], self.landing]
        count = self.sock.recvmsg_into(into)[0]
        self.filled = max(count - self.missing, 0)
        self.missing = max(self.missing - count, 0)
        sent = _LENGTH.unpack(self.head)[0]
        if not self.missing and sent != self.total:
            raise PeerError(
                f"rank {self.source} sends {sent} bytes where {self.total} are expected: all ranks must call the same "
                "collective with tensors of the same length and dtype."
            )
        return count

    def _combine(self) -> None:
        size, whole = self.tensor.element_size(), self.filled == self.total
        first, count = self.combined // size, self.filled // size
        mine = self.tensor if whole else self.tensor[first : first + count]
        COMBINE[self.op](mine, torch.frombuffer(self.block, dtype=self.tensor.dtype, count=count))
        self.combined, self.filled = self.combined + self.filled, 0
        self.landing = self.landing[: self.total - self.combined]

    def _gone(self) -> PeerError:
        arrived = self.combined + self.filled
        return PeerError(f"rank {self.source} has closed its connection: {arrived} of {self.total} bytes had arrived.")

    def waits(self) -> tuple[int, int, str]:
        arrived = self.combined + self.filled
        words = f"waits for rank {self.source}, from which {arrived} of {self.total} bytes have arrived"
        return self.sock.fileno(), select.POLLIN, words


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory; through uint8, because numpy does not know bfloat16."""
    return memoryview(tensor.view(torch.uint8).numpy())
