"""Every algorithm against float64 and against dist.all_reduce: values, bits, bytes, on real ranks.

Hypothesis draws a list of examples; one run of ranks works through all of them, a barrier before each.
"""

import sys
from dataclasses import dataclass

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from course_lib import run
from course_lib.collectives import Communicator, TorchTransport
from course_lib.collectives.communicator import ALGORITHMS
from course_lib.collectives.operand import DTYPES

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

LAYOUTS = ("flat", "inside", "column", "transposed", "leaf", "scalar or matrix")


@dataclass(frozen=True)
class Example:
    """One all-reduce. `members` is the group that does it; the other ranks of the run stand by."""

    algorithm: str
    op: str
    dtype: torch.dtype
    numel: int
    layout: str
    members: tuple[int, ...]
    node_size: int
    seed: int
    infinite: bool

    def values(self, rank: int) -> torch.Tensor:
        """What `rank` brings: a flat tensor."""
        random = torch.Generator().manual_seed(1000 * self.seed + rank)
        if not self.dtype.is_floating_point:
            most = 2**62 if self.dtype == torch.int64 else 2**30  # sums may wrap around, as in torch
            return torch.randint(-most, most, (self.numel,), generator=random, dtype=self.dtype)
        scale = torch.tensor([1e-7, 1e-3, 1.0, 300.0])[torch.randint(4, (self.numel,), generator=random)]
        values = torch.randn(self.numel, generator=random, dtype=torch.float64).mul(scale)
        if self.infinite and self.numel:
            values[self.seed % self.numel] = float("inf") if rank % 2 else -float("inf")
        return values.to(self.dtype)

    def communicator(self, group: dist.ProcessGroup | None) -> Communicator:
        extra = {"node_size": self.node_size} if self.algorithm == "hierarchical" else {}
        return Communicator(TorchTransport(group), self.algorithm, **extra)


@st.composite
def examples(draw, ranks: int) -> Example:
    members = draw(st.sampled_from(GROUPS[ranks]))
    op = draw(st.sampled_from(["sum", "mean", "max"]))
    dtypes = [dtype for dtype in DTYPES if op != "mean" or dtype.is_floating_point]
    return Example(
        algorithm=draw(st.sampled_from(sorted(ALGORITHMS))),
        op=op,
        dtype=draw(st.sampled_from(dtypes)),
        numel=draw(st.integers(0, 2 * ranks + 1) | st.sampled_from([64, 97, 1000, 20000])),
        layout=draw(st.sampled_from(LAYOUTS)),
        members=members,
        node_size=draw(st.sampled_from([n for n in range(1, len(members) + 1) if len(members) % n == 0])),
        seed=draw(st.integers(0, 10**6)),
        infinite=draw(st.booleans()),
    )


def groups(ranks: int) -> list[tuple[int, ...]]:
    """All ranks; every second; all but the first."""
    everybody = tuple(range(ranks))
    return list(dict.fromkeys([everybody, everybody[::2], everybody[1:] or everybody]))


GROUPS = {ranks: groups(ranks) for ranks in (1, 2, 3, 4, 5, 7)}


def lay_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, tensor in it that holds the values); the rest of the memory is 7."""
    n = len(values)
    memory = torch.full((n, 3) if layout == "column" else (n + 4,), 7, dtype=values.dtype)
    if layout == "column":
        tensor = memory[:, 1]
    elif layout == "transposed":  # a matrix where the length is even
        memory = torch.full((n,), 7, dtype=values.dtype)
        tensor = memory.view(n // 2, 2).t() if n % 2 == 0 else memory
    elif layout == "scalar or matrix":
        tensor = memory[2 : 2 + n].view(()) if n == 1 else memory[2 : 2 + n].view(1, n, 1)
    else:
        tensor = memory[2 : 2 + n]
    tensor.copy_(values.view(tensor.shape))
    if layout == "leaf" and values.dtype.is_floating_point:
        tensor.requires_grad_()
    return memory, tensor


def on_each_rank(todo: list[Example]) -> list:
    """For each example (result, dist.all_reduce's result, the rest is untouched, bytes it should have sent)."""
    made = {members: dist.new_group(list(members)) for members in dict.fromkeys(e.members for e in todo)}
    me, answers = dist.get_rank(), []
    for example in todo:
        dist.barrier()
        if me not in example.members:
            answers.append(None)
            continue
        communicator = example.communicator(made[example.members])
        memory, tensor = lay_out(example.values(me), example.layout)
        communicator.all_reduce(tensor, example.op)
        result = torch.empty(example.numel, dtype=example.dtype).copy_(tensor.detach().reshape(-1))
        tensor.detach().fill_(7)
        theirs = example.values(me)
        dist.all_reduce(theirs, dist.ReduceOp.MAX if example.op == "max" else dist.ReduceOp.SUM, made[example.members])
        stated = communicator.bytes_sent(example.numel, example.dtype.itemsize)
        answers.append((result, theirs, bool((memory == 7).all()), stated))
    return answers


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def judge(example: Example, answers: list) -> None:
    """`answers` are those of the members of the group, in order."""
    brought = torch.stack([example.values(rank) for rank in example.members])
    ours, theirs = answers[0][:2]
    assert all(bits(answer[0]) == bits(ours) for answer in answers), "other bits on other ranks"
    assert all(answer[2] for answer in answers), "memory outside of the tensor was changed"
    assert ours.dtype == example.dtype
    if example.op == "max":
        assert torch.equal(ours, brought.amax(0) if example.numel else ours)
        assert torch.equal(ours, theirs)
    elif not example.dtype.is_floating_point:
        assert torch.equal(ours, brought.sum(0, dtype=example.dtype))
        assert torch.equal(ours, theirs)
    else:
        close_to_float64(example, brought.double(), ours.double(), theirs.double())


def close_to_float64(example: Example, brought: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """N - 1 additions in any order are off by at most (N - 1) eps sum|x|; a division rounds once more."""
    count, rounding = len(example.members), torch.finfo(example.dtype)
    scale = count if example.op == "mean" else 1
    exact, most = brought.sum(0) / scale, brought.abs().sum(0) / scale
    bound = count * rounding.eps * most + rounding.smallest_normal * rounding.eps
    finite = exact.isfinite()
    assert torch.equal(torch.nan_to_num(ours[~finite], nan=5.0), torch.nan_to_num(exact[~finite], nan=5.0))
    assert ((ours - exact).abs() <= bound)[finite].all()
    assert ((ours - theirs / scale).abs() <= 2 * bound)[finite].all()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", GROUPS)
def test_values_bits_and_bytes(ranks, sent_by):
    @settings(
        max_examples=1, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(examples(ranks), min_size=60, max_size=60, unique=True))
    def work(todo):
        done = run(on_each_rank, ranks, args=(todo,), quiet=True)
        sent = [sent_by(done, rank) for rank in range(ranks)]
        for number, example in enumerate(todo):
            answers = [done.results[rank][number] for rank in example.members]
            try:
                judge(example, answers)
            except AssertionError as error:
                raise AssertionError(f"{example}: {error}") from error
            expected = dict(zip(example.members, (answer[3] for answer in answers), strict=True))
            assert {rank: sent[rank][number] for rank in range(ranks)} == {
                rank: expected.get(rank, 0) for rank in range(ranks)
            }, example

    work()
