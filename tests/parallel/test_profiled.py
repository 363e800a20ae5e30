"""What `profiled` brings back from a rank, and the sets of moments that it is made of."""

import doctest
import sys
import time
from itertools import pairwise

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib import run
from course_lib.collectives import Communicator, communicator
from course_lib.launch import watch
from course_lib.parallel import intervals, phases
from course_lib.parallel.intervals import difference, intersection, total, union
from course_lib.parallel.phases import Raw
from course_lib.parallel.profiled import profiled

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (min(p), max(p))), max_size=8)


def cells(pieces):
    """The other way to compute: each whole unit of time that is covered."""
    return {cell for start, end in pieces for cell in range(start, end)}


@given(PIECES, PIECES)
def test_intervals_against_a_grid(a, b):
    assert cells(union(a)) == cells(a)
    assert cells(intersection(a, b)) == cells(a) & cells(b)
    assert cells(difference(a, b)) == cells(a) - cells(b)
    assert total(a) == len(cells(a))
    for found in (union(a), intersection(a, b), difference(a, b)):
        assert all(left[1] < right[0] for left, right in pairwise(found))


def test_examples_of_intervals():
    found = doctest.testmod(intervals)
    assert found.attempted and not found.failed


def kinds(spans):
    return [(span.kind, span.start, span.end) for span in spans]


def two_steps():
    """Forward, backward with a hook that waits, averaging, optimizer; then forward and backward twice, optimizer."""
    raw = [
        Raw("aten::linear", 1, 3), Raw("aten::addmm", 1.5, 2.5),
        Raw("autograd::engine::evaluate_function: AddmmBackward0", 4, 9), Raw("AddmmBackward0", 4, 9, scope=1),
        Raw("aten::mm", 4, 5), Raw("c10d::allreduce_", 5, 5.5), Raw("gloo:all_reduce", 5.5, 8, scope=7),
        Raw("aten::div_", 10, 11),
        Raw("Optimizer.step#SGD.step", 12, 14, scope=7), Raw("aten::add_", 13, 13.5),
        Raw("Optimizer.zero_grad#SGD.zero_grad", 14.2, 14.6, scope=7), Raw("aten::zero_", 14.3, 14.5),
        Raw("torchvision::nms", 15, 16), Raw("aten::mm", 17, 18), Raw("aten::relu", 19, 20), Raw("aten::mm", 21, 22),
        Raw("Optimizer.step#Outer.step", 23, 26, scope=7), Raw("Optimizer.step#Inner.step", 24, 25, scope=7),
        Raw("aten::add_", 24, 25), Raw("aten::sum", 27, 28),
    ]  # fmt: skip
    return raw, [(4, 9), (17, 18), (21, 22)]


def test_kinds_of_computing():
    """Accumulation: what runs between two backwards of a step is forward. A hook that waits is no computing."""
    raw, backwards = two_steps()
    assert kinds(phases.compute(raw, backwards)) == [
        ("forward", 1, 3), ("backward", 4, 5), ("other", 10, 11), ("optimizer", 13, 13.5), ("optimizer", 14.3, 14.5),
        ("forward", 15, 16), ("backward", 17, 18), ("forward", 19, 20), ("backward", 21, 22), ("optimizer", 24, 25),
        ("other", 27, 28),
    ]  # fmt: skip
    assert phases.steps(raw, 0.5, 30) == [(0.5, 14), (14, 26)]
    assert phases.steps([], 0.5, 30) == [(0.5, 30)]
    assert kinds(phases.communication(raw)) == [("all_reduce", 5.5, 8)]


def test_what_ddp_starts_in_backward_is_over_when_that_returns():
    """Only then: what a wrapper by hand starts may go on."""
    raw = [Raw("gloo:all_reduce", 3, 6, scope=7), Raw("gloo:all_reduce", 7, 9, scope=7)]
    assert kinds(phases.communication(raw, [(2, 5)])) == [("all_reduce", 3, 6), ("all_reduce", 7, 9)]
    raw.append(Raw("DistributedDataParallel.forward", 1, 2, scope=7))
    assert kinds(phases.communication(raw, [(2, 5)])) == [("all_reduce", 3, 5), ("all_reduce", 7, 9)]


def test_sums_of_a_collective_on_the_computing_thread_are_communication():
    raw = [Raw("aten::mm", 1, 2), Raw("aten::add_", 3, 4), Raw("aten::mul", 4.5, 6)]
    assert kinds(phases.compute(raw, [], taken=[(2.5, 5)])) == [("other", 1, 2), ("other", 5, 6)]


def test_on_a_gpu_kernels_count():
    """The CPU is far ahead: a kernel belongs to the phase in which it was launched. NCCL's kernels are no computing."""
    raw = [
        Raw("aten::mm", 1, 1.1, id=1), Raw("aten::mm", 2, 2.1, id=2), Raw("nccl:all_reduce", 2.2, 2.3, scope=7, id=3),
        Raw("Optimizer.step#SGD.step", 4, 5, scope=7), Raw("aten::add_", 4.2, 4.3, id=4),
        Raw("gemm_kernel", 2, 6, device=True, launched_by=1), Raw("gemm_kernel", 6, 9, device=True, launched_by=2),
        Raw("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7, 11, device=True, launched_by=3),
        Raw("foreach_kernel", 11, 12, device=True, launched_by=4),
    ]  # fmt: skip
    assert kinds(phases.compute(raw, [(2, 3)])) == [("forward", 2, 6), ("backward", 6, 9), ("optimizer", 11, 12)]
    assert kinds(phases.communication(raw)) == [("all_reduce", 7, 11)]


def train(steps: int) -> str:
    """DDP, and one all-reduce that is over long before somebody waits for it."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    Communicator().all_reduce(torch.ones(100))
    early = dist.all_reduce(torch.ones(1), async_op=True)
    time.sleep(0.3)
    early.wait()
    return "trained"


def fails() -> None:
    torch.ones(1, requires_grad=True).backward()
    raise ValueError("meant to fail")


def several() -> tuple:
    """Two profiles and a failure between them, in one rank."""
    original = torch.autograd.backward
    first = profiled(train)(2)
    try:
        profiled(fails)()
    except ValueError as error:
        told = str(error)
    clean = torch.autograd.backward is original and not communicator.listeners
    clean = clean and not [path for path in watch.passing if "parallel" in path]
    return first, profiled(train)(steps=3), told, clean


@pytest.fixture(scope="module")
def real():
    return run(several, ranks=2, quiet=True)


def test_a_real_run(real):
    for rank, (first, second, told, clean) in enumerate(real.results):
        assert (first.value, first.rank, first.turn, len(first.steps)) == ("trained", rank, 0, 2)
        assert (second.turn, len(second.steps), second.gpu) == (2, 3, False)  # the one that failed counts
        assert (told, clean) == ("meant to fail", True)
        for profile in (first, second):
            assert {"forward", "backward", "optimizer"} <= {span.kind for span in profile.compute}
            inside = [(profile.begin, profile.end)]
            whole = [(span.start, span.end) for span in (*profile.compute, *profile.communication)]
            assert difference(whole, inside) == []  # one clock for all
            assert len(profile.backwards) == len(profile.steps)
            assert difference(profile.backwards, inside) == []
            (call,) = profile.calls
            assert (call.op, call.nbytes, call.computing) == ("all_reduce", 400, True)
            operators = [(span.start, span.end) for span in profile.compute]
            assert intersection(operators, [(call.start, call.end)]) == []


def test_backward_computes_within_its_call(real):
    profile = real.results[0][0]
    backward = [(span.start, span.end) for span in profile.compute if span.kind == "backward"]
    assert total(intersection(backward, profile.backwards)) > 0.9 * total(backward)


def test_an_early_end_is_known(real):
    """The last all-reduce was over before the sleep was, whatever the return of wait() says."""
    profile = real.results[0][0]
    last = profile.communication[-1]
    assert last.kind == "all_reduce"
    assert last.end < profile.end - 0.1


def test_nothing_is_printed(real):
    assert real.output == ["", ""]


def test_what_ddp_sends_comes_from_the_line_that_called_backward(real):
    places = {m.where for m in real.messages if m.op == "all_reduce" and m.nbytes > 4}
    assert len(places) == 1  # the same line in each step
    assert places.pop().startswith("test_profiled.py, line ")


def test_bad_input_is_a_sentence():
    with pytest.raises(TypeError, match=r"wraps a function that trains, not NoneType"):
        profiled(None)
