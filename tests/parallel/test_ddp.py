"""The DDP wrapper, on one rank in this process; with more ranks in test_knobs.py, test_hooks.py and tests/train."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel import hooks
from course_lib.parallel.ddp import DDPOptions, check, gradient_bytes, sync_buffers, wrap
from course_lib.parallel.ddp_options import DEFAULT


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


def replaced(module: nn.Module) -> None:
    module[3].weight = nn.Parameter(torch.zeros(3, 5))


CHANGES = {
    "dtype": (nn.Module.double, "0.weight, 0.bias, 1.weight and 3 more changed"),
    "frozen": (lambda module: module[0].bias.requires_grad_(False), "^0.bias changed"),
    "replaced": (replaced, r"^weight \(replaced\) changed"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_changed_after_wrapping_is_refused(change):
    """torch itself says nothing for the first: see test_knobs.py."""
    module, (alter, text) = net(), CHANGES[change]
    model = wrap(module, torch.zeros(4, 6))
    model(torch.randn(4, 6)).sum().backward()
    alter(module)
    with pytest.raises(RuntimeError, match=text):
        model(torch.randn(4, 6))
    with torch.no_grad():
        model(torch.randn(4, 6, dtype=module[0].weight.dtype))  # without gradients there is nothing to go wrong


@pytest.mark.usefixtures("alone")
def test_moving_to_where_it_is_changes_nothing():
    model = wrap(net(), torch.zeros(4, 6))
    model.to("cpu").float()(torch.randn(4, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("alone")
def test_a_second_hook_is_refused_and_the_first_one_named():
    model = wrap(net(), torch.zeros(4, 6), DDPOptions(comm_hook="bf16"))
    with pytest.raises(RuntimeError, match=r"has the comm hook bf16_compress_hook already.*so onebit_hook was not"):
        model.register_comm_hook(hooks.OneBit(), hooks.onebit_hook)


@pytest.mark.usefixtures("alone")
def test_static_graph_does_not_accumulate():
    model = wrap(net(), torch.zeros(4, 6), DDPOptions(static_graph=True))
    model(torch.randn(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\) does not go with static_graph"):
        model.no_sync()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (DDPOptions(bucket_mb=0), "bucket_mb must be a finite number greater than 0, or None, but is 0"),
        (DDPOptions(timeout_s=float("inf")), "timeout_s must be a finite number"),
        (DDPOptions(comm_hook="zip"), "comm_hook must be one of none, fp16, .*, but is 'zip'"),
        (DDPOptions(powersgd_rank=0), "powersgd_rank must be at least 1, but is 0"),
        (DDPOptions(powersgd_start=1), "powersgd_start must be at least 2, but is 1"),
        (DDPOptions(static_graph=True, find_unused_parameters=True), "exclude each other"),
    ],
)
def test_bad_options_are_refused_with_the_reason(options, text):
    with pytest.raises(ValueError, match=text):
        check(options)


def test_accumulation_and_static_graph():
    with pytest.raises(ValueError, match=r"does not go with accumulation \(4 backwards an update\)"):
        check(DDPOptions(static_graph=True), accumulate=4)
    check(DDPOptions(static_graph=True))
    check(DEFAULT, accumulate=4)


@pytest.mark.parametrize("module", [nn.Linear, "a model"])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(TypeError, match=r"give a torch\.nn\.Module that is not wrapped yet"):
        wrap(module, torch.zeros(2, 3))


@pytest.mark.usefixtures("alone")
def test_a_wrapped_model_is_not_wrapped_again():
    with pytest.raises(TypeError, match=r"module is a CheckedDDP"):
        wrap(wrap(net(), torch.zeros(2, 6)), torch.zeros(2, 6))


def test_wrapping_before_the_process_group_is_refused():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group before it"):
        wrap(net(), torch.zeros(2, 6))


@pytest.mark.usefixtures("alone")
def test_a_module_that_returns_no_tensor_is_refused():
    with pytest.raises(TypeError, match="LSTM returns a tuple: a tensor is needed"):
        wrap(nn.LSTM(6, 5), torch.zeros(2, 6))
