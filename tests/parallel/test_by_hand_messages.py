"""What data parallelism by hand sends: how many all-reduces, of which size, and when, by the record of the run."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import run
from course_lib.collectives import Communicator
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport
from course_lib.launch import Message, Result
from course_lib.parallel import BucketedDDP, NaiveDDP, OverlappedDDP

cloudpickle.register_pickle_by_value(sys.modules[__name__])
VERSIONS = {"naive": NaiveDDP, "bucketed": BucketedDDP, "overlapped": OverlappedDDP}
RANKS, LAYERS, WIDTH = 3, 4, 20
WEIGHT, BIAS = WIDTH * WIDTH * 8, WIDTH * 8  # bytes, in float64
CAPACITY = (WEIGHT + 2 * BIAS) / 2**20  # MiB
COUNTS = 2 * LAYERS * 4  # bytes of the all-reduce that counts users
# By hand, from the last parameter to the first: a bias, a weight and the bias before it fill a bucket exactly.
BUCKETS = [BIAS + WEIGHT + BIAS, WEIGHT + BIAS, WEIGHT + BIAS, WEIGHT]


def net() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)))


def three_micro_batches(model: nn.Module, gathered: int) -> None:
    """Three backwards, of which the first `gathered` are not synchronised; then the only synchronize."""
    for k in range(gathered + 1):
        with model.no_sync() if k < gathered else nullcontext():
            model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
    dist.barrier()  # marks the end of backward in the record
    model.synchronize()


def every_version() -> list[int]:
    """Between two barriers: backwards; then, up to the next one, what comes after them. And bytes as formulas say."""
    ring = Communicator()
    for gathered, communicator in ((0, None), (2, None), (0, ring)):
        for version in VERSIONS.values():
            model = version(net(), communicator, CAPACITY)
            dist.barrier()
            three_micro_batches(model, gathered)
            dist.barrier()
            model.close()
    return [ring.bytes_sent(nbytes // 8, 8) for nbytes in BUCKETS] + [ring.bytes_sent(2 * LAYERS, 4)]


@pytest.fixture(scope="module")
def result() -> Result:
    return run(every_version, RANKS, quiet=True)


@pytest.fixture(scope="module")
def phases(result) -> list[dict[str, tuple[list[Message], list[Message]]]]:
    """Of each rank: (version, case) -> what it sent during the backwards, and after them."""
    found = []
    for rank in range(RANKS):
        parts: list[list[Message]] = [[]]
        for message in (m for m in result.messages if m.rank == rank):
            if message.op == "barrier":
                parts.append([])
            else:
                parts[-1].append(message)
        keys = [f"{version} {case}" for case in ("plain", "gathered", "ring") for version in VERSIONS]
        assert len(parts) == 3 * len(keys) + 1
        found.append({key: (parts[3 * k + 1], parts[3 * k + 2]) for k, key in enumerate(keys)})
    return found


def sizes(messages: list[Message]) -> list[int]:
    assert {m.op for m in messages} <= {"all_reduce"}
    return [m.nbytes for m in messages]


@pytest.mark.parametrize("case", ["plain", "gathered"])
def test_number_and_size_of_all_reduces(phases, case):
    """The same for three micro-batches, of which two are not synchronised, as for one."""
    for rank in range(RANKS):
        during, after = phases[rank][f"naive {case}"]
        assert sizes(during) == []
        assert sizes(after) == [WEIGHT, BIAS] * LAYERS + [COUNTS]
        during, after = phases[rank][f"bucketed {case}"]
        assert sizes(during) == []
        assert sizes(after) == [*BUCKETS, COUNTS]
        during, after = phases[rank][f"overlapped {case}"]
        assert sizes(during) == BUCKETS
        assert sizes(after) == [COUNTS]
    assert sum(BUCKETS) == LAYERS * (WEIGHT + BIAS)


def test_bytes_of_the_ring(result, phases):
    """Through the course's ring each bucket costs what the formula says. During backward its thread may have sent
    some of it or all: which, is up to the scheduler."""
    for rank in range(RANKS):
        for version in ("bucketed", "overlapped"):
            sent = [sum(m.nbytes for m in part if m.op == "isend") for part in phases[rank][f"{version} ring"]]
            assert sum(sent) == sum(result.results[rank])
            if version == "bucketed":
                assert sent[0] == 0


class Watched(nn.Module):
    """Calls `seen` when backward has passed the last layer and has still to compute the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(50, 400), nn.Linear(400, 400)
        self.seen: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.first(x)
        between.register_hook(lambda _: self.seen())
        return self.last(torch.relu(between))


def at_half_time(kind: str, communicator: Communicator | None) -> tuple[int, bool]:
    """In the middle of backward: how many sums have started, and whether the first ends before backward goes on."""
    model, found = VERSIONS[kind](Watched(), communicator, bucket_mb=400 * 400 * 4 / 2**20), []

    def seen() -> None:
        started, limit = getattr(model, "_started", []), time.monotonic() + 20
        done = [work.is_completed if communicator is None else work.future.done for work in started]
        while done and not done[0]() and time.monotonic() < limit:
            time.sleep(0.001)
        found.append((len(done), bool(done) and done[0]()))

    model.module.seen = seen
    model(torch.ones(8, 50)).sum().backward()
    model.synchronize()
    model.close()
    return found[0]


def both() -> dict[str, list[tuple[int, bool]]]:
    with TcpTransport() as tcp, SharedTransport() as shared:
        ways = (None, Communicator(), Communicator(tcp), Communicator(shared))
        return {kind: [at_half_time(kind, way) for way in ways] for kind in ("bucketed", "overlapped")}


def test_an_all_reduce_ends_while_backward_goes_on():
    """Backward stops before its first layer until the bucket of the last layer has been summed: an all-reduce that
    only runs after backward, or only inside wait(), would never be complete there.

    Of 3 buckets (the last bias; the last weight; the first layer) two are under way at that moment.
    """
    for found in run(both, 2, quiet=True).results:
        assert found == {"bucketed": [(0, False)] * 4, "overlapped": [(2, True)] * 4}
