"""What messages, sums and whole all-reduces take on this machine; the numbers that `fit` makes a model of.

`run(measure, ranks=4, watch=False).results` is what `fit.fit` wants. All contenders take turns in each round, so a busy
moment of the machine hits them alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from course_lib.cluster.cores import cores
from course_lib.collectives import halving, naive, ring, tree
from course_lib.collectives.transport import TorchTransport, Transport

SIZES = tuple(4**k for k in range(5, 12))  # bytes of a message: 1 kB to 4 MB
TOTALS = (1 << 20, 4 << 20, 16 << 20)  # bytes of a whole tensor
ALGORITHMS = {"naive": naive, "tree": tree, "halving": halving, "ring": ring}
_LAP = 1e-3  # seconds that a measurement should last; shorter ones are repeated


@dataclass
class Samples:
    """What one rank measured: seconds[name, nbytes] of each round.

    "pair"      one message from rank 0 to rank 1 or back, while all others wait
    "pairs"     the same between ranks 0 and 1, 2 and 3, ..., all at once
    "around"    each rank sends to its right neighbour and receives from its left, as the ring does
    "add"       adding two tensors on rank 0, while all others wait; "adds": on all ranks at once
    "naive" ... a whole all-reduce by that algorithm
    """

    rank: int
    ranks: int
    cores: int
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)


def measure(
    sizes: tuple[int, ...] = SIZES, totals: tuple[int, ...] = TOTALS, rounds: int = 9,
    algorithms: tuple[str, ...] = ("naive", "tree", "ring"), limit: float = 15.0,
) -> Samples:  # fmt: skip
    """Called on each rank. `sizes`, `totals`: bytes of single messages, of whole tensors; multiples of 4.

    Ends after `rounds` rounds, or after the round in which `limit` seconds are over: a busy machine gives fewer.
    """
    t = TorchTransport()
    if t.size < 2:
        raise ValueError("Messages need two ranks: measure with ranks=2 or more.")
    found = Samples(t.rank, t.size, cores())
    tasks = [task for nbytes in sizes for task in _messages(t, nbytes)]
    tasks += [task for nbytes in totals for task in _all_reduces(t, nbytes, algorithms)]
    repeats, started = {}, time.perf_counter()
    for turn in range(rounds + 1):  # the first one warms up, and says how often to repeat the short ones
        for name, nbytes, count, work in tasks:
            again = repeats.get((name, nbytes), 1)
            dist.barrier()
            began = time.perf_counter()
            for _ in range(again):
                work()
            passed = (time.perf_counter() - began) / again
            if turn:
                found.seconds.setdefault((name, nbytes), []).append(passed / count)
            else:
                again = _LAP / max(passed, 1e-6) if name not in ALGORITHMS else 1
                repeats[name, nbytes] = _least(min(max(round(again), 1), 20))
        if turn and _least(time.perf_counter() - started < limit) == 0:
            break
    return found


def _messages(t: Transport, nbytes: int) -> list[tuple[str, int, int, Callable[[], None]]]:
    """(name, bytes, messages in it, what to do). Ones, not zeros: memory never written to is not really there."""
    chunks = list(torch.ones(t.size, nbytes // 4).unbind())
    other = torch.ones(nbytes // 4)
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size

    def ping_pong(pairs: int) -> None:
        if t.rank // 2 < pairs:
            calls = [lambda: t.send(chunks[0], t.rank ^ 1), lambda: t.recv(chunks[0], t.rank ^ 1)]
            for call in reversed(calls) if t.rank % 2 else calls:
                call()

    def around() -> None:
        for step in range(t.size - 1):
            t.exchange(chunks[(t.rank - step) % t.size], right, chunks[(t.rank - step - 1) % t.size], left)

    def add() -> None:
        for chunk in chunks:
            chunk.add_(other)

    return [
        ("pair", nbytes, 2, lambda: ping_pong(1)),
        ("pairs", nbytes, 2, lambda: ping_pong(t.size // 2)),
        ("around", nbytes, t.size - 1, around),
        ("add", nbytes, t.size, lambda: None if t.rank else add()),
        ("adds", nbytes, t.size, add),
    ]


def _all_reduces(t: Transport, nbytes: int, algorithms: tuple[str, ...]) -> list:
    tensor = torch.zeros(nbytes // 4)  # zero stays zero, however often it is summed
    tensor += 0.0
    return [
        (name, nbytes, 1, lambda name=name: ALGORITHMS[name].all_reduce(tensor, transport=t)) for name in algorithms
    ]


def _least(number: int) -> int:
    """The smallest of all ranks' numbers, so that all do the same."""
    least = torch.tensor(int(number))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
