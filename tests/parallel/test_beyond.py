"""ZeRO-1, tensor and pipeline parallelism against one process and torch's own class."""

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from course_lib import run
from course_lib.launch import Result
from course_lib.parallel import pipeline_schedule
from course_lib.parallel.pipeline import PipelineStage
from course_lib.parallel.pipeline_schedule import Op
from course_lib.parallel.tensor import ColumnParallelLinear, TensorParallelPair, share
from course_lib.parallel.zero import ZeroOne

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS, STEPS = 3, 5
SCHEDULES = {"gpipe": pipeline_schedule.gpipe, "1f1b": pipeline_schedule.one_f_one_b}
OPTIMIZERS: dict[str, tuple[type, dict[str, Any], int]] = {  # the last: numbers of state for each weight
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, 1),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, 2),
}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def model() -> nn.Sequential:
    """Three stages, with a tanh each."""
    torch.manual_seed(3)
    sizes = [(5, 7), (7, 6), (6, 3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)).double()


def odd() -> nn.Sequential:
    """4*5 + 5 + 5*2 = 35 weights that are trained, which neither 2 nor 3 divides, and 2 that are not."""
    torch.manual_seed(4)
    made = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    made[2].bias.requires_grad_(False)
    return made


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def sample_loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    return net(random(2, net[0].in_features, seed=100 * step + rank)).square().sum()


# ZeRO-1 ---------------------------------------------------------------------------------------------------------------


def zero_one(name: str, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], int, int]:
    """Weights after each step, bytes of state, length of a part."""
    kind, options, _ = OPTIMIZERS[name]
    net, rows = odd(), []
    zero = ZeroOne(net.parameters(), kind, group, **options)
    for step in range(STEPS):
        sample_loss(net, step, dist.get_rank(group)).backward()
        zero.step()
        zero.zero_grad()
        rows.append(flat(net.parameters()))
    return rows, zero.state_bytes(), zero.length


def torch_zero(name: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    kind, options, _ = OPTIMIZERS[name]
    net, rows = odd(), []
    trained = [p for p in net.parameters() if p.requires_grad]
    from torch.distributed.optim import ZeroRedundancyOptimizer  # a long import, which each worker would do

    zero = ZeroRedundancyOptimizer(trained, kind, process_group=group, **options)
    for step in range(STEPS):
        zero.zero_grad()
        sample_loss(net, step, dist.get_rank(group)).backward()
        for p in trained:
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
        zero.step()
        rows.append(flat(net.parameters()))
    return rows


def plain(name: str, ranks: int) -> list[torch.Tensor]:
    """One process that has the samples of all ranks."""
    kind, options, _ = OPTIMIZERS[name]
    net, rows = odd(), []
    optimizer = kind([p for p in net.parameters() if p.requires_grad], **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(sample_loss(net, step, rank) for rank in range(ranks)) / ranks).backward()
        optimizer.step()
        rows.append(flat(net.parameters()))
    return rows


# Tensor parallelism ---------------------------------------------------------------------------------------------------


def layers(hidden: int, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(5)
    return nn.Linear(4, hidden, bias=bias).double(), nn.Linear(hidden, 6, bias=bias).double()


def tensor_pair(hidden: int, bias: bool, group: dist.ProcessGroup) -> dict[str, Any]:
    """Output, gradient of the input, and by name the gradients of this rank's part of the weights."""
    x = random(2, 3, 4, seed=6).requires_grad_()
    pair = TensorParallelPair(*layers(hidden, bias), group=group)
    y = pair(x)
    (y * random(2, 3, 6, seed=7)).sum().backward()
    return {"y": y.detach(), "x.grad": x.grad} | {name: p.grad for name, p in pair.named_parameters()}


# Pipeline -------------------------------------------------------------------------------------------------------------

SAMPLES = 8


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return random(SAMPLES, 5, seed=8), random(SAMPLES, 3, seed=9)


def pipeline(name: str, microbatches: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, float | None, int]:
    """Gradients of this rank's stages, the loss, the peak. With fewer ranks than layers the last stage has the rest."""
    stages, stage = dist.get_world_size(group), dist.get_rank(group)
    net, (inputs, targets) = model(), batch()
    mine = net[stage:] if stage == stages - 1 else net[stage : stage + 1]
    runner = PipelineStage(mine, inputs.new_empty(net[stage][0].in_features), functional.mse_loss, group)
    ops = SCHEDULES[name](stages, microbatches)[stage]
    if stage > 0:
        inputs = torch.full_like(inputs, torch.nan)  # not to be looked at
    if stage < stages - 1:
        targets = torch.full_like(targets, torch.nan)
    loss = runner.run(ops, inputs, targets)
    return flat(p.grad for p in mine.parameters()), loss, runner.peak


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def refusals() -> list[str]:
    stage = PipelineStage(nn.Identity(), torch.empty(1), functional.mse_loss)
    mixed = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    return [
        refused(lambda: ColumnParallelLinear(nn.Linear(2, RANKS - 1))),
        refused(lambda: TensorParallelPair(nn.Linear(2, 6), nn.Linear(7, 2))),
        refused(lambda: ZeroOne([nn.Parameter(torch.zeros(1), requires_grad=False)], torch.optim.SGD, lr=1)),
        refused(lambda: ZeroOne(mixed, torch.optim.SGD, lr=1)),
        refused(lambda: PipelineStage(nn.Identity(), torch.empty(1, device="meta"), functional.mse_loss)),
        refused(lambda: stage.run([Op("forward", 1), Op("forward", 0)], torch.zeros(1, 1), torch.zeros(1, 1))),
    ]


PAIRS = [(7, True), (6, True), (3, False)]
PIPELINES = [(name, microbatches) for name in SCHEDULES for microbatches in (1, 2, 3, 8)]


def everything() -> dict[Any, Any]:
    """Of this rank, for each number of ranks that it is one of."""
    found: dict[Any, Any] = {}
    for ranks in range(1, RANKS + 1):
        group = dist.new_group(range(ranks))  # all ranks make it
        if dist.get_rank() < ranks:
            for name in OPTIMIZERS:
                found["zero", name, ranks] = zero_one(name, group)
                found["torch", name, ranks] = torch_zero(name, group)
            for hidden, bias in PAIRS:
                mine = share(hidden, group)
                found["tensor", hidden, ranks] = (mine.start, mine.stop), tensor_pair(hidden, bias, group)
            for name, microbatches in PIPELINES:
                found["pipeline", name, microbatches, ranks] = pipeline(name, microbatches, group)
    found["refused"] = refusals()
    return found


@pytest.fixture(scope="module")
def result() -> Result:
    return run(everything, RANKS, quiet=True)


@pytest.fixture(scope="module")
def found(result) -> list[dict[Any, Any]]:
    return result.results


every_size = pytest.mark.parametrize("ranks", range(1, RANKS + 1))


@every_size
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_one_is_the_plain_optimizer_on_averaged_gradients(found, name, ranks):
    for rank in range(ranks):
        for ours, wanted in zip(found[rank]["zero", name, ranks][0], plain(name, ranks), strict=True):
            close(ours, wanted)


@every_size
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_one_is_torch_s_zero_redundancy_optimizer(found, name, ranks):
    for rank in range(ranks):
        theirs = found[rank]["torch", name, ranks]
        for ours, wanted in zip(found[rank]["zero", name, ranks][0], theirs, strict=True):
            close(ours, wanted)


@every_size
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_one_keeps_a_part_of_the_state(found, name, ranks):
    """35 weights of 8 bytes: parts of 35, 18 and 12, the last of which ends with one zero."""
    for rank in range(ranks):
        _, nbytes, length = found[rank]["zero", name, ranks]
        assert length == {1: 35, 2: 18, 3: 12}[ranks]
        assert nbytes == 8 * length * OPTIMIZERS[name][2]


def test_zero_one_sends_two_messages_a_step(result):
    """What rank 0 puts into each: all gradients, padded; its part of the weights. Nothing else here uses these ops."""
    sent = {"reduce_scatter": [], "all_gather": []}
    for m in result.messages:
        for op in sent:
            if m.rank == 0 and m.op.startswith(op) and m.op != "all_gather_object":
                sent[op].append(m.nbytes // 8)
    times = STEPS * len(OPTIMIZERS)
    assert sent == {
        "reduce_scatter": [35] * times + [36] * times + [36] * times,
        "all_gather": [35] * times + [18] * times + [12] * times,
    }


@every_size
@pytest.mark.parametrize(("hidden", "bias"), PAIRS)
def test_tensor_parallel_pair_is_the_whole_layers(found, hidden, bias, ranks):
    first, second = layers(hidden, bias)
    x = random(2, 3, 4, seed=6).requires_grad_()
    y = second(functional.gelu(first(x)))
    (y * random(2, 3, 6, seed=7)).sum().backward()
    end = 0
    for rank in range(ranks):
        (start, stop), ours = found[rank]["tensor", hidden, ranks]
        assert start == end and stop - start in (hidden // ranks, -(-hidden // ranks))
        end = stop
        close(ours["y"], y.detach())
        close(ours["x.grad"], x.grad)
        close(ours["first.weight"], first.weight.grad[start:stop])
        close(ours["second.weight"], second.weight.grad[:, start:stop])
        assert ("first.bias" in ours) == ("second.bias" in ours) == bias
        if bias:
            close(ours["first.bias"], first.bias.grad[start:stop])
            close(ours["second.bias"], second.bias.grad)
    assert end == hidden


@every_size
@pytest.mark.parametrize(("name", "microbatches"), PIPELINES)
def test_a_pipeline_has_the_gradients_of_the_whole_batch(found, name, microbatches, ranks):
    net, (inputs, targets) = model(), batch()
    loss = functional.mse_loss(net(inputs), targets)
    loss.backward()
    ours = [found[rank]["pipeline", name, microbatches, ranks] for rank in range(ranks)]
    close(torch.cat([gradients for gradients, _, _ in ours]), flat(p.grad for p in net.parameters()))
    assert [loss for _, loss, _ in ours[:-1]] == [None] * (ranks - 1)
    assert ours[-1][1] == pytest.approx(loss.item(), rel=1e-10)
    kept = [microbatches] * ranks if name == "gpipe" else [min(ranks - s, microbatches) for s in range(ranks)]
    assert [peak for _, _, peak in ours] == kept


def test_what_cannot_be_cut_is_refused_in_a_sentence(found):
    for rank in range(RANKS):
        features, layers, nothing, mixed, device, samples = found[rank]["refused"]
        assert "2 features" in features and "3 parts" in features
        assert "gives 6" in layers and "takes 7" in layers
        assert "nothing to train" in nothing
        assert "torch.float32 on cpu, torch.float64 on cpu" in mixed
        assert "CPU" in device and "meta" in device
        assert "1 samples" in samples and "2 microbatches" in samples
