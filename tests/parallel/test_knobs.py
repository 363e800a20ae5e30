"""What the knobs of torch's DDP change: what is sent, memory, gradients. All on two ranks of one run."""

import sys
from collections.abc import Callable
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.launch import Result
from course_lib.parallel.ddp import DDPOptions, wrap

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS, LAYERS, WIDTH = 2, 6, 300
WEIGHT, BIAS = WIDTH * WIDTH * 8, WIDTH * 8  # bytes in float64
MIB = 2**20
STEPS = 3
EXAMPLE = torch.zeros(1, WIDTH, dtype=torch.float64)


class Net(nn.Sequential):
    """Layers that are used in the order in which they stand; BatchNorm in front, and one that is left out at will."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.norm, self.skip = nn.BatchNorm1d(WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in [self[k] for k in range(LAYERS - self.skip)]:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, micro: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=made)


def build(options: DDPOptions | None = None, **torchs) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    module = Net().double()
    return wrap(module, EXAMPLE, options) if options else DistributedDataParallel(module, **torchs)


def steps(model: nn.Module, micro: int = 1, inside: tuple[bool, bool] = (True, True)) -> torch.Tensor:
    """The gradients of each step, in a row; a barrier before each marks it in the messages."""
    rows = []
    for step in range(STEPS):
        dist.barrier()
        model.zero_grad()
        for k in range(micro):
            contexts = [model.no_sync() if k < micro - 1 and wanted else nullcontext() for wanted in inside]
            with contexts[0]:
                loss = model(batch(step, k)).square().sum()
            with contexts[1]:
                loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def memory(view: bool) -> int:
    """Bytes of the storages behind gradients and buckets."""
    model, buckets = build(gradient_as_bucket_view=view, bucket_cap_mb=1), {}

    def look(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda found: found.value()[0])

    model.register_comm_hook(None, look)
    for step in range(2):
        buckets.clear()
        model(batch(step)).sum().backward()
    grads = [p.grad.untyped_storage() for p in model.parameters()]
    return sum((buckets | {s.data_ptr(): s.nbytes() for s in grads}).values())


def evaluates() -> torch.Tensor:
    model = build()
    model.eval()
    return steps(model)


def autocast() -> torch.Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(9, 9))
    for _ in range(STEPS):
        dist.barrier()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(2, 9)).sum()
        loss.backward()
    return torch.zeros(0)


def converted() -> torch.Tensor:
    """torch says nothing, and averages nothing."""
    model = build()
    model.float()
    return steps(Float32(model))


class Float32(nn.Module):
    """Changes the dtype of the input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.no_sync = model, model.no_sync

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.float())


def unused() -> torch.Tensor:
    model = build(find_unused_parameters=True)
    model.module.skip = True
    return steps(model)


WAYS: dict[str, Callable[[], torch.Tensor]] = {
    "default": lambda: steps(build()),
    "25": lambda: steps(build(bucket_cap_mb=25)),
    "1.4": lambda: steps(build(bucket_cap_mb=1.4)),
    "wrapped": lambda: steps(build(DDPOptions())),
    "wrapped 1.4": lambda: steps(build(DDPOptions(bucket_mb=1.4, gradient_as_bucket_view=True))),
    "static": lambda: steps(build(DDPOptions(static_graph=True))),
    "find unused": lambda: steps(build(DDPOptions(find_unused_parameters=True))),
    "unused": unused,
    "buffers stay": lambda: steps(build(DDPOptions(forward_sync_buffers=False))),
    "timeout": lambda: steps(build(DDPOptions(timeout_s=30))),
    "eval": evaluates,
    "autocast": autocast,
    "converted": converted,
    "no_sync": lambda: steps(build(DDPOptions()), 3),
    "no_sync around forward": lambda: steps(build(DDPOptions()), 3, (True, False)),
    "no_sync around backward": lambda: steps(build(DDPOptions()), 3, (False, True)),
    "no no_sync": lambda: steps(build(DDPOptions()), 3, (False, False)),
}


def every_way() -> tuple[dict[str, torch.Tensor], list[int]]:
    found = {}
    for name, way in WAYS.items():
        dist.all_gather_object([None] * RANKS, name)  # marks the beginning of a way
        found[name] = way()
    dist.barrier()
    return found, [memory(view) for view in (False, True)]


@pytest.fixture(scope="module")
def result() -> Result:
    return run(every_way, RANKS, quiet=True)


@pytest.fixture(scope="module")
def sent(result) -> dict[str, list[list[tuple[str, int]]]]:
    """Of rank 0: way -> for each step (op, bytes) of what was sent in it."""
    ways: list[list[list[tuple[str, int]]]] = []
    for m in result.messages:
        if m.rank == 0 and m.op == "all_gather_object":
            ways.append([])
        elif m.rank == 0 and m.op == "barrier":
            ways[-1].append([])
        elif m.rank == 0 and ways[-1]:
            ways[-1][-1].append((m.op, m.nbytes))
    return dict(zip(WAYS, ways, strict=True))


def sums(step: list[tuple[str, int]]) -> list[int]:
    return [nbytes for op, nbytes in step if op == "all_reduce"]


ALL = LAYERS * (WEIGHT + BIAS) + 2 * BIAS  # with the two vectors of BatchNorm


def test_buckets_are_filled_anew_after_the_first_backward(sent):
    for way in ("default", "25", "1.4"):
        assert sums(sent[way][0]) == [ALL]
        assert sum(sums(sent[way][1])) == ALL
        assert sums(sent[way][1]) == sums(sent[way][2])
    first = sums(sent["default"][1])[0]
    assert MIB <= first < MIB + WEIGHT and len(sums(sent["default"][1])) == 2
    assert sums(sent["25"][1]) == [ALL]  # so an explicit 25 is not the default
    assert all(nbytes >= 1.4 * MIB for nbytes in sums(sent["1.4"][1])[:-1]) and len(sums(sent["1.4"][1])) == 3


def test_wrap_has_settled_the_buckets(sent):
    assert all(sums(step) == sums(sent["default"][1]) for step in sent["wrapped"])
    assert all(sums(step) == sums(sent["1.4"][1]) for step in sent["wrapped 1.4"])
    assert all(sums(step) == sums(sent["default"][1]) for step in sent["static"])


def test_unused_parameters_cost_one_more_all_reduce(sent):
    assert all(sums(step)[-1] == 4 * 2 * (LAYERS + 1) for step in sent["find unused"])
    assert all(sum(sums(step)[:-1]) == ALL for step in sent["find unused"])


def test_buffers(sent):
    broadcasts = {way: [n for op, n in sent[way][2] if op == "broadcast"] for way in ("wrapped", "buffers stay")}
    assert sum(broadcasts["wrapped"]) == 2 * BIAS + 8 and broadcasts["buffers stay"] == []


def test_eval_and_autocast_do_not_change_what_is_sent(sent):
    assert sum(sums(sent["eval"][2])) == ALL
    assert sums(sent["autocast"][2]) == [4 * 90]  # float32, as the parameters are


def test_no_sync_counts_where_forward_is(sent):
    once = sums(sent["wrapped"][2])
    assert sums(sent["no_sync"][2]) == sums(sent["no_sync around forward"][2]) == once
    assert sums(sent["no no_sync"][2]) == sums(sent["no_sync around backward"][2]) == once * 3


def test_gradients_are_the_same_whatever_the_knobs(result):
    (one, _), (other, _) = result.results
    for way in WAYS:
        if way != "converted":
            assert torch.equal(one[way], other[way]), way
    for way in ("25", "1.4", "wrapped", "wrapped 1.4", "static", "find unused", "timeout"):
        torch.testing.assert_close(one[way], one["default"], rtol=1e-12, atol=1e-12)
    for way in ("no_sync around forward", "no_sync around backward", "no no_sync"):
        torch.testing.assert_close(one[way], one["no_sync"], rtol=1e-12, atol=1e-12)
    assert one["unused"].abs().sum() > 0


def test_one_process_has_the_same_gradients(result):
    """The oracle: the mean of both ranks' gradients, with the weights of rank 0."""
    torch.manual_seed(0)
    module, (one, _) = Net().double(), result.results[0]
    for step in range(STEPS):
        parts = []
        for rank in range(RANKS):
            made = torch.Generator().manual_seed(100 * step + rank)
            loss = module(torch.randn(4, WIDTH, dtype=torch.float64, generator=made)).square().sum()
            parts.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, module.parameters())]))
        torch.testing.assert_close(one["default"][step], sum(parts) / RANKS, rtol=1e-10, atol=1e-12)


def test_after_conversion_torch_averages_nothing_and_says_nothing(result, sent):
    (one, _), (other, _) = result.results
    assert not torch.equal(one["converted"], other["converted"])
    assert all(sums(step) == [] for step in sent["converted"])


def test_bucket_views_save_one_copy_of_the_gradients(result):
    assert result.results[0][1] == [2 * ALL, ALL]
