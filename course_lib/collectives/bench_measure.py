"""What runs in the ranks of `course bench ring`: every way to all-reduce, one after the other, again and again."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_lib.collectives import ring
from course_lib.collectives.bench_limits import loopback, memcpy
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport
from course_lib.collectives.transport import TorchTransport

GLOO = "gloo's all_reduce"
# Contender: what it is
CONTENDERS = {
    GLOO: "dist.all_reduce",
    "ring, torch p2p": "our ring over isend and irecv of torch.distributed",
    "ring, TCP": "our ring over TcpTransport",
    "ring, shared": "our ring over SharedTransport, ordinary tensors",
    "ring, zero-copy": "our ring over SharedTransport, tensors from its empty()",
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
            ways, tensors = ways_to_reduce(size // 4, tcp, shared)
            _verify(ways, tensors, size // 4)
            ways["memcpy"] = memcpy(size)
            if dist.get_world_size() % 2 == 0:
                ways["loopback TCP"] = loopback(size, plain)
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


def ways_to_reduce(
    numel: int, tcp: TcpTransport, shared: SharedTransport
) -> tuple[dict[str, Callable[[], object]], dict[str, torch.Tensor]]:
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


def over_ranks(results: list[Samples]) -> Samples:
    """One rank's samples made of those of all: of each figure the largest, so the slowest rank counts."""

    def join(samples: tuple[Sample, ...]) -> Sample:
        return Sample(*(max(getattr(s, f) for s in samples) for f in ("seconds", "cpu", "sleeps")))

    return {
        size: {name: [join(found) for found in zip(*(r[size][name] for r in results), strict=True)] for name in names}
        for size, names in results[0].items()
    }
