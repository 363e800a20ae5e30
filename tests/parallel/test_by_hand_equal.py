"""Data parallelism by hand equals one process on the whole batch, and torch's DDP, after each of ten steps."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.collectives import Communicator
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport
from course_lib.parallel import BucketedDDP, NaiveDDP, OverlappedDDP

cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS, BATCH = 10, 4
UNEVEN_STEPS = 4
pytestmark = pytest.mark.slow
VERSIONS = {"naive": NaiveDDP, "bucketed": BucketedDDP, "overlapped": OverlappedDDP}
SMALL = 400 / 2**20  # MiB: several buckets, and tensors that are larger than a bucket
EXACT = {"rtol": 1e-10, "atol": 1e-13}
Steps = dict[str, torch.Tensor]  # name: its values after each step, stacked; NaN where a gradient is None


class Branching(nn.Module):
    """Takes another way in each step, and on each rank: some parameters are used on one rank, some on none."""

    def __init__(self) -> None:
        super().__init__()
        self.nobody, self.stem = nn.Linear(6, 6), nn.Linear(6, 6)
        self.ways = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(self.ways[way](x) if way < 2 else x)


class Plain(nn.Sequential):
    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return super().forward(x)


class Frozen(nn.Module):
    """Its layers stand in another order than that in which they are used, so gradients do not come bucket by bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(9, 3), nn.Linear(6, 9), nn.Linear(9, 9)
        for parameter in (self.first.weight, self.middle.bias, self.last.bias):
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def tied() -> nn.Module:
    """One layer stands at two places, and another one shares only its weight."""
    layer, cousin = nn.Linear(6, 6), nn.Linear(6, 6)
    cousin.weight = layer.weight
    return Plain(layer, nn.Tanh(), layer, nn.Tanh(), cousin, nn.Linear(6, 3))


def normed() -> nn.Module:
    return Plain(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Mixed(Plain):
    """float64, float32 and bfloat16 parameters by turns."""

    def __init__(self) -> None:
        kinds = [torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float32]
        super().__init__(*(nn.Linear(6, 6).to(kind) for kind in kinds))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        for layer in self:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x[:, :3].double()


MODELS = {"frozen": Frozen, "tied": tied, "branching": Branching}


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(1000 + seed)
    module = make()
    return module if make is Mixed else module.double()


def data(step: int, rank: int, samples: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, 6, dtype=torch.float64, generator=made), torch.randint(3, (samples,), generator=made)


def way(step: int, rank: int) -> int:
    return (step + rank) % 3 if step % 4 else 2  # in steps 0, 4 and 8 nobody takes a branch


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], way: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0], way), batch[1])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Record:
    """Parameters, buffers and gradients after each step."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.seen = module, []

    def note(self) -> None:
        values = {name: value.clone() for name, value in self.module.state_dict().items()}
        for name, p in self.module.named_parameters():
            values[f"{name}.grad"] = torch.full_like(p, torch.nan) if p.grad is None else p.grad.clone()
        self.seen.append(values)

    def steps(self) -> Steps:
        return {name: torch.stack([values[name] for values in self.seen]).detach() for name in self.seen[0]}


def steps_of(model: nn.Module) -> Steps:
    """Ten steps of one rank. Gradients are set to None and to zero by turns, and every fifth time left there."""
    optimizer, rank, record = sgd(model), dist.get_rank(), Record(model.module)
    for step in range(STEPS):
        if step % 5 != 3:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, data(step, rank), way(step, rank)).backward()
        if not isinstance(model, DistributedDataParallel):
            model.synchronize()
        optimizer.step()
        record.note()
    return record.steps()


def one_process(make: Callable[[], nn.Module], ranks: int) -> Steps:
    """The same steps on the whole batch, in this process."""
    module = build(make, seed=0)
    optimizer, record = sgd(module), Record(module)
    for step in range(STEPS):
        if step % 5 != 3:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        parts = [data(step, rank) for rank in range(ranks)]
        if make is Branching:  # not one forward: each part takes its own way
            loss = sum(loss_of(module, part, way(step, rank)) for rank, part in enumerate(parts)) / ranks
        else:
            loss = loss_of(module, tuple(map(torch.cat, zip(*parts, strict=True))), 0)
        loss.backward()
        optimizer.step()
        record.note()
    return record.steps()


def uneven_micro_batches(model: nn.Module) -> Steps:
    """Three micro-batches a step, of other sizes on each rank; only the last backward is synchronised.

    The loss is a sum over samples, times the number of ranks, over the number of samples of all ranks.
    """
    optimizer, rank, record = sgd(model), dist.get_rank(), Record(model.module)
    weight = dist.get_world_size() / sum(map(samples, range(dist.get_world_size())))
    for step in range(UNEVEN_STEPS):
        optimizer.zero_grad()
        micros = data(step, rank, samples(rank))
        for k, (x, y) in enumerate(zip(*(part.split([4, rank + 5, 4]) for part in micros), strict=True)):
            with model.no_sync() if k < 2 else nullcontext():
                (nn.functional.cross_entropy(model(x, 0), y, reduction="sum") * weight).backward()
        if not isinstance(model, DistributedDataParallel):
            model.synchronize()
        optimizer.step()
        record.note()
    return record.steps()


def samples(rank: int) -> int:
    return rank + 13


def one_process_uneven(make: Callable[[], nn.Module], ranks: int) -> Steps:
    module = build(make, seed=0)
    optimizer, record = sgd(module), Record(module)
    for step in range(UNEVEN_STEPS):
        optimizer.zero_grad()
        parts = [data(step, rank, samples(rank)) for rank in range(ranks)]
        loss_of(module, tuple(map(torch.cat, zip(*parts, strict=True))), 0).backward()
        optimizer.step()
        record.note()
    return record.steps()


def everything() -> dict[str, Steps]:
    """What is compared on this rank; the weights of other ranks than 0 are other ones.

    At 2, 3 and 4 ranks each of MODELS by each version; at 3 also the communicators, BatchNorm, mixed dtypes
    (these at 2, too, where a sum has one order) and uneven micro-batches.
    """
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}

    def wrap(version: str, make: Callable[[], nn.Module], communicator: Communicator | None = None) -> nn.Module:
        return VERSIONS[version](build(make, rank), communicator, SMALL, "zero" if make is Branching else "error")

    with TcpTransport() as tcp, SharedTransport() as shared:
        ring = Communicator()  # over torch's isend and irecv
        own = [{"tcp": Communicator(tcp)}, {"shared": Communicator(shared, "halving")}]  # by turns
        for number, (name, version) in enumerate((n, v) for n in MODELS for v in VERSIONS):
            also = {"ring": ring} if (name, version) == ("tied", "overlapped") else own[number % 2]
            for over, communicator in {"torch": None, **(also if size == 3 else {})}.items():
                model = wrap(version, MODELS[name], communicator)
                found[f"{name} {version} {over}"] = steps_of(model)
                model.close()
    more = {"normed": normed} if size == 3 else {}
    more |= {"mixed": Mixed} if size < 4 else {}
    for name, make in {**MODELS, **more}.items():
        ddp = DistributedDataParallel(build(make, rank), find_unused_parameters=make is Branching)
        found[f"{name} ddp"] = steps_of(ddp)
        if name in more:
            found |= {f"{name} {version}": steps_of(wrap(version, make)) for version in VERSIONS}
    if size == 3:
        for version in VERSIONS:
            found[f"uneven {version}"] = uneven_micro_batches(wrap(version, tied))
            found[f"uneven normed {version}"] = uneven_micro_batches(wrap(version, normed))
        found["uneven normed ddp"] = uneven_micro_batches(DistributedDataParallel(build(normed, rank)))
    return found


def assert_equal_steps(found: Steps, expected: Steps, rtol: float, atol: float) -> None:
    """After each step: the first one that differs is told."""
    assert found.keys() == expected.keys()
    wrong = [
        (int((~near).flatten(1).any(1).nonzero()[0]), name)
        for name, value in expected.items()
        if not (near := found[name].isclose(value, rtol=rtol, atol=atol, equal_nan=True)).all()
    ]
    if wrong:
        step, name = min(wrong)
        told = f"after step {step}, {name}"
        torch.testing.assert_close(
            found[name][step], expected[name][step], rtol=rtol, atol=atol, msg=lambda m: f"{told}: {m}"
        )


@pytest.fixture(scope="module")
def all_of() -> Callable[[int], list[dict[str, Steps]]]:
    """What each of so many ranks found."""
    return cache(lambda size: run(everything, size, timeout=150, quiet=True, watch=False).results)


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, all_of) -> list[dict[str, Steps]]:
    return all_of(request.param)


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_process_on_the_whole_batch(ranks, name):
    expected = one_process(MODELS[name], len(ranks))
    assert all(len(values) == STEPS for values in expected.values())
    assert any(not torch.equal(values[0], values[-1]) for k, values in expected.items() if not k.endswith("grad"))
    for found in ranks:
        by = [key for key in found if re.fullmatch(f"{name} \\w+ (torch|tcp|shared|ring)", key)]
        assert len(by) == len(VERSIONS) * (2 if len(ranks) == 3 else 1)
        for key in by:
            assert_equal_steps(found[key], expected, **EXACT)


def test_uneven_micro_batches_equal_one_process(all_of):
    expected = one_process_uneven(tied, 3)
    for version in VERSIONS:
        for found in all_of(3):
            assert_equal_steps(found[f"uneven {version}"], expected, **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_torch_ddp(ranks, name):
    for version in VERSIONS:
        for found in ranks:
            assert_equal_steps(found[f"{name} {version} torch"], found[f"{name} ddp"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["normed", "uneven normed"])
def test_batch_norm_equals_torch_ddp(all_of, name):
    """Not one process: each rank normalises its own part of the batch, so one process on the whole of it, with
    other means and variances, computes something else. Running statistics are compared too: each rank has its own."""
    ranks = all_of(3)
    for version in VERSIONS:
        for found in ranks:
            assert_equal_steps(found[f"{name} {version}"], found[f"{name} ddp"], rtol=1e-12, atol=1e-14)
    assert not torch.equal(*(found[f"{name} ddp"]["1.running_mean"] for found in ranks[:2]))


@pytest.mark.parametrize("size", [2, 3])
def test_mixed_dtypes_are_those_of_torch_ddp(all_of, size):
    """bfloat16 has 8 bits: its sums depend on the order of additions, with more than two ranks."""
    ranks = all_of(size)
    tolerance = {"rtol": 0, "atol": 0} if len(ranks) == 2 else {"rtol": 0.02, "atol": 0.002}
    for version in VERSIONS:
        for found in ranks:
            assert_equal_steps(found[f"mixed {version}"], found["mixed ddp"], **tolerance)
            assert {v.dtype for v in found[f"mixed {version}"].values()} == {
                torch.float64, torch.float32, torch.bfloat16
            }  # fmt: skip


def test_bits(ranks):
    """All ranks hold the same ones; with two ranks, where a sum has one order, they are those of torch's DDP."""
    for key, first in ranks[0].items():
        name = key.split()[0]
        if name in MODELS and "ddp" not in key:
            for other in ranks[1:]:
                assert_equal_steps(other[key], first, rtol=0, atol=0)
            if len(ranks) == 2:
                assert_equal_steps(first, ranks[0][f"{name} ddp"], rtol=0, atol=0)


class AveragesWeights(OverlappedDDP):
    """A published mistake: the argument of the hook is the parameter, and that is what it averages."""

    def arrived(self, number: int) -> None:
        parameter = self.learnable[number]
        dist.all_reduce(parameter.data)
        parameter.data.div_(dist.get_world_size())

    def average(self) -> None:
        """Already done, it believes."""


def with_the_mistake() -> Steps:
    return steps_of(AveragesWeights(build(tied, dist.get_rank())))


def test_averaging_weights_instead_of_gradients_is_caught():
    for found in run(with_the_mistake, 3, quiet=True, watch=False).results:
        with pytest.raises(AssertionError, match="after step 0"):
            assert_equal_steps(found, one_process(tied, 3), **EXACT)
