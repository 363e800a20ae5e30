"""What runs in the ranks of `course bench ring`: every way to all-reduce, one after the other, again and again."""

import contextlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_lib.collectives import ring
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport
from course_lib.collectives.transport import TorchTransport

GLOO = "gloo's all_reduce"
# Contender: what it is. The two last ones are no all-reduce but what the machine can do.
CONTENDERS = {
    GLOO: "dist.all_reduce",
    "ring, torch p2p": "our ring over isend and irecv of torch.distributed",
    "ring, TCP": "our ring over TcpTransport",
    "ring, shared": "our ring over SharedTransport, ordinary tensors",
    "ring, zero-copy": "our ring over SharedTransport, tensors from its empty()",
}
LIMITS = {
    "memcpy": "each rank copies that many bytes within its memory",
    "loopback TCP": "one rank sends that many bytes to another over a plain socket",
}
_BLOCK_BYTES = 16 << 20  # bytes in a block of calls, so that short calls are timed together


@dataclass(frozen=True)
class Sample:
    """A call, on average over one block of calls, on one rank."""

    seconds: float
    cpu: float  # CPU-seconds of all threads of the rank
    sleeps: float  # how often one of its threads gave up its core to wait


Samples = dict[int, dict[str, list[Sample]]]  # by size in bytes, then contender: one for each round


def calls_in_block(nbytes: int) -> int:
    """How many calls are timed together."""
    return max(1, min(50, _BLOCK_BYTES // nbytes))


def measure(sizes: list[int], rounds: int) -> Samples:
    """What this rank finds for each size and contender.

    In each round every contender has its turn at every size, in the order of the table or backwards by turns, so
    that what else happens on the machine meets them all. Raises RuntimeError when one gives a wrong sum.
    """
    with TcpTransport() as tcp, SharedTransport() as shared, TcpTransport() as plain:
        for sock in plain.sockets.values():
            sock.settimeout(60)
        times: Samples = {}
        for size in sizes:
            ways, tensors = _ways(size // 4, tcp, shared)
            _verify(ways, tensors, size // 4)
            ways["memcpy"] = _memcpy(size)
            if dist.get_world_size() % 2 == 0:
                ways["loopback TCP"] = _loopback(size, plain)
            times[size] = {name: [] for name in ways}
            for number in range(rounds):
                if dist.get_rank() == 0:
                    print(f"{dist.get_world_size()} ranks, {words(size)}: round {number + 1} of {rounds}", flush=True)
                for name, call in list(ways.items())[:: -1 if number % 2 else 1]:
                    times[size][name].append(_time(call, calls_in_block(size)))
    return times


def words(nbytes: int) -> str:
    """4096 -> "4 KB"; the bench counts in powers of 1024."""
    for unit, scale in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def _time(call: Callable[[], object], times: int) -> Sample:
    call()  # memory and caches as the following calls find them
    dist.barrier()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(times):
        call()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(seconds / times, cpu / times, (after.ru_nvcsw - before.ru_nvcsw) / times)


def _ways(numel: int, tcp: TcpTransport, shared: SharedTransport) -> tuple[dict, dict]:
    """({contender: call}, {contender: the tensor it works on})."""
    ordinary, own = torch.zeros(numel), shared.empty(numel)
    torch_p2p = TorchTransport()
    tensors = dict.fromkeys(CONTENDERS, ordinary) | {"ring, zero-copy": own}
    return {
        GLOO: lambda: dist.all_reduce(ordinary),
        "ring, torch p2p": lambda: ring.all_reduce(ordinary, "sum", torch_p2p),
        "ring, TCP": lambda: ring.all_reduce(ordinary, "sum", tcp),
        "ring, shared": lambda: ring.all_reduce(ordinary, "sum", shared),
        "ring, zero-copy": lambda: ring.all_reduce(own, "sum", shared),
    }, tensors


def _verify(ways: dict[str, Callable], tensors: dict[str, torch.Tensor], numel: int) -> None:
    """Each contender must add right before it is timed; its tensor is zeros afterwards, and stays so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = (torch.arange(numel) % 100 * size + size * (size - 1) // 2).float()
    for name, call in ways.items():
        tensors[name].copy_(torch.arange(numel) % 100 + rank)
        call()
        if not torch.equal(tensors[name], wanted):
            raise RuntimeError(f"{name} gives a wrong sum of {numel} elements over {size} ranks.")
        tensors[name].zero_()


def _memcpy(nbytes: int) -> Callable[[], object]:
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _loopback(nbytes: int, plain: TcpTransport) -> Callable[[], object]:
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


def _fill(sock, memory: memoryview) -> None:
    got = 0
    while got < len(memory):
        if not (count := sock.recv_into(memory[got:])):
            raise ConnectionError("the other rank has closed the plain connection")
        got += count


def over_ranks(results: list[Samples]) -> Samples:
    """One rank's samples made of those of all: of each figure the largest, so the slowest rank counts."""

    def join(samples: tuple[Sample, ...]) -> Sample:
        return Sample(*(max(getattr(s, f) for s in samples) for f in ("seconds", "cpu", "sleeps")))

    return {
        size: {name: [join(found) for found in zip(*(r[size][name] for r in results), strict=True)] for name in names}
        for size, names in results[0].items()
    }


@contextlib.contextmanager
def progress(stream):
    """Show the lines that are printed within as one that changes, on a terminal; else as they are."""
    if not stream.isatty():
        with contextlib.redirect_stdout(stream):
            yield
        return
    with contextlib.redirect_stdout(_OneLine(stream)):
        yield
    stream.write("\r\x1b[K")


class _OneLine:
    def __init__(self, stream) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if text.strip():
            self._stream.write(f"\r\x1b[K{text.strip()}")

    def flush(self) -> None:
        self._stream.flush()
