"""The DDP wrapper, on one rank in this process; N ranks are compared in tests/train/test_numbers.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel.ddp import gradient_bytes, sync_buffers, wrap


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.mark.usefixtures("alone")
def test_wrapping_leaves_no_trace():
    """The thrown-away step: no gradient, no moved statistic, no used random number, still in training mode."""
    module, before = net(), net().state_dict()
    state = torch.get_rng_state()
    model = wrap(module, torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert module.training
    assert all(p.grad is None for p in module.parameters())
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.usefixtures("alone")
def test_sync_buffers_keeps_rank_0():
    module = net()
    module[1].running_mean.fill_(3.0)
    sync_buffers(module)
    assert torch.equal(module[1].running_mean, torch.full((5,), 3.0))


def test_gradient_bytes():
    module = net()
    assert gradient_bytes(module) == 4 * (6 * 5 + 5 + 5 + 5 + 5 * 3 + 3)
    module[0].weight.requires_grad_(False)
    assert gradient_bytes(module.double()) == 8 * (5 + 5 + 5 + 5 * 3 + 3)
