"""What this machine can do at best: the limits that `course bench ring` shows beside the contenders."""

import socket
from collections.abc import Callable

import torch

from course_lib.collectives.tcp import TcpTransport

LIMITS = {
    "memcpy": "each rank copies that many bytes within its memory",
    "loopback TCP": "one rank sends that many bytes to another over a plain socket",
}


def memcpy(nbytes: int) -> Callable[[], object]:
    """A copy within this rank's memory; all ranks make it at the same time."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


def loopback(nbytes: int, plain: TcpTransport) -> Callable[[], object]:
    """Ranks 0, 2, … send to ranks 1, 3, …; one byte comes back when all has arrived."""
    rank = plain.rank
    memory, answer = memoryview(bytearray(nbytes)), bytearray(1)
    sock = plain.sockets[rank ^ 1]

    def send() -> None:
        sock.sendall(memory)
        _fill(sock, memoryview(answer))

    def receive() -> None:
        _fill(sock, memory)
        sock.sendall(answer)

    return receive if rank % 2 else send


def _fill(sock: socket.socket, memory: memoryview) -> None:
    got = 0
    while got < len(memory):
        if not (count := sock.recv_into(memory[got:])):
            raise ConnectionError("the other rank has closed the plain connection")
        got += count
