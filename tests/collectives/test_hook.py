"""DDP with the course's all-reduce over TCP and shared memory, next to DDP with torch's own."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.collectives.communicator import Communicator
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport

cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS = 4


def net(seed: int, dtype: torch.dtype) -> nn.Module:
    """With a frozen parameter and a weight that is used twice."""
    torch.manual_seed(seed)
    shared = nn.Linear(300, 300)
    module = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), shared, nn.Tanh(), shared, nn.Linear(300, 3))
    module[0].bias.requires_grad_(False)
    return module.to(dtype)


def train_side_by_side(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """After each step all gradients of each model in a row: torch's own, over TCP, over shared memory."""
    rank, steps = dist.get_rank(), []
    with TcpTransport() as tcp, SharedTransport() as shared:
        hooks = {"torch": None, "tcp": Communicator(tcp).hook, "shared": Communicator(shared, "halving").hook}
        models = {}
        for name, hook in hooks.items():
            # Other weights on each rank, which DDP must replace; small buckets, so that there are several.
            models[name] = DistributedDataParallel(net(rank, dtype), bucket_cap_mb=0.1)
            if hook:
                models[name].register_comm_hook(None, hook)
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.05) for name, model in models.items()}
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)
            batch, target = torch.randn(8, 20, dtype=dtype), torch.randint(3, (8,))
            for name, model in models.items():
                optimizers[name].zero_grad()
                nn.functional.cross_entropy(model(batch), target).backward()
                optimizers[name].step()
            steps.append({name: _gradients(model) for name, model in models.items()})
    return steps


def _gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (3, torch.float64)])
def test_gradients_equal_those_of_torch(ranks, dtype):
    results = run(train_side_by_side, ranks, args=(dtype,), quiet=True).results
    for step in range(STEPS):
        for name in ("tcp", "shared"):
            torch.testing.assert_close(results[0][step][name], results[0][step]["torch"], rtol=1e-5, atol=1e-7)
            if dtype == torch.float64:
                torch.testing.assert_close(results[0][step][name], results[0][step]["torch"], rtol=1e-10, atol=1e-13)
            assert all(torch.equal(found[step][name], results[0][step][name]) for found in results)
    first, last = results[0][0]["torch"], results[0][-1]["torch"]
    assert first.abs().max() > 0 and not torch.equal(first, last)


def same_bits_as_torch() -> list[bool]:
    """One backward of equal models: with two ranks a sum has only one order, and halving is exact."""
    rank, found = dist.get_rank(), {}
    with TcpTransport() as tcp, SharedTransport() as shared:
        for name, hook in {"torch": None, "tcp": Communicator(tcp).hook, "shared": Communicator(shared).hook}.items():
            model = DistributedDataParallel(net(5, torch.float32), bucket_cap_mb=0.1)
            if hook:
                model.register_comm_hook(None, hook)
            torch.manual_seed(rank)
            model(torch.randn(8, 20)).square().sum().backward()
            found[name] = _gradients(model)
    return [torch.equal(found[name], found["torch"]) for name in ("tcp", "shared")]


def test_with_two_ranks_the_bits_are_those_of_torch():
    assert run(same_bits_as_torch, 2, quiet=True).results == [[True, True]] * 2
