"""Comm hooks: bytes by formula against what was sent, error against the exact mean, memory of what was not sent."""

import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.collectives import Communicator
from course_lib.launch import Result
from course_lib.parallel import hooks
from course_lib.parallel.ddp import DDPOptions, wrap
from course_lib.parallel.hooks.onebit import pack, unpack

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RANKS, STEPS = 3, 5
SHAPES = [(40, 30), (30,), (50, 24), (7,)]  # with 1 KiB buckets: several
SIZES = [torch.Size(shape).numel() for shape in SHAPES]
NUMEL = sum(SIZES)


class Linear(nn.Module):
    """Its loss is the sum of parameter times coefficient, so its gradient is the coefficient."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in SHAPES)

    def forward(self, coefficients: torch.Tensor) -> torch.Tensor:
        parts = coefficients.split(SIZES)
        order = (2, 0, 3, 1)  # not that of the parameters: DDP will fill its buckets anew
        return sum((self.weights[k].flatten() * parts[k]).sum() for k in order)


def gradient(step: int, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, dtype=torch.float64, generator=made)


def averages(model: nn.Module, change: Callable[[torch.Tensor, int], torch.Tensor] = lambda g, step: g) -> torch.Tensor:
    """What the hook makes of the gradients of each step. A barrier before each marks it in the messages."""
    rows = []
    for step in range(STEPS):
        dist.barrier()
        model.zero_grad()
        model(change(gradient(step, dist.get_rank()), step)).backward()
        rows.append(torch.cat([w.grad.flatten() for w in model.module.weights]))
    return torch.stack(rows)


def by_name(hook: str, change: Callable = lambda g, step: g, **options) -> torch.Tensor:
    options = {"bucket_mb": 1 / 1024, "powersgd_start": 2} | options
    model = wrap(Linear(), torch.zeros(NUMEL, dtype=torch.float64), DDPOptions(comm_hook=hook, **options))
    return averages(model, change)


def onebit(state: hooks.OneBit, change: Callable = lambda g, step: g) -> torch.Tensor:
    """Registered before the first backward, as torch's documentation does it."""
    model = DistributedDataParallel(Linear(), bucket_cap_mb=1 / 1024)
    model.register_comm_hook(state, hooks.onebit_hook)
    return averages(model, change)


def with_inf(when: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda g, step: torch.where(torch.arange(NUMEL) == 5, torch.inf, g) if step == when else g


def overflow() -> list[list[float]]:
    """What comes of one gradient that all ranks have."""
    found = []
    for hook in ("fp16", "bf16"):
        model = wrap(nn.Linear(1, 1, bias=False), torch.zeros(1, 1), DDPOptions(comm_hook=hook))
        found.append([])
        for value in (60_000.0, 66_000.0, 1e-8):
            model.zero_grad()
            model(torch.tensor([[value]])).sum().backward()
            found[-1].append(model.module.weight.grad.item())
    return found


NAMES = ("none", "fp16", "bf16", "powersgd", "onebit", "ring", "shared")
WAYS: dict[str, Callable[[], torch.Tensor]] = {
    **{name: lambda name=name: by_name(name) for name in NAMES},
    "views": lambda: by_name("onebit", gradient_as_bucket_view=True),
    "static": lambda: by_name("onebit", static_graph=True),
    "shared, views": lambda: by_name("shared", gradient_as_bucket_view=True),
    "forgets": lambda: onebit(hooks.OneBit(feedback=False)),
    "from the first backward": lambda: onebit(hooks.OneBit()),
    "powersgd, inf": lambda: by_name("powersgd", change=with_inf(2)),
    "inf": lambda: onebit(hooks.OneBit(), with_inf(1)),
}


def every_way() -> tuple[dict[str, torch.Tensor], list[list[float]], int]:
    found = {}
    for name, way in WAYS.items():
        dist.reduce(torch.zeros(1), 0)  # marks the beginning of a way
        found[name] = way()
    dist.barrier()
    return found, overflow(), Communicator().bytes_sent(NUMEL, 8)


@pytest.fixture(scope="module")
def result() -> Result:
    return run(every_way, RANKS, quiet=True)


@pytest.fixture(scope="module")
def found(result) -> dict[str, torch.Tensor]:
    ours = [ways for ways, _, _ in result.results]
    for way in WAYS:
        for other in ours[1:]:
            assert torch.equal(other[way].nan_to_num(7), ours[0][way].nan_to_num(7)), f"{way}: other bits"
    return ours[0]


@pytest.fixture(scope="module")
def sent(result) -> dict[str, list[dict[str, list[int]]]]:
    """Of rank 1: way -> for each step op -> bytes of each call."""
    ways: list[list[dict[str, list[int]]]] = []
    for m in result.messages:
        if m.rank == 1 and m.op == "reduce":
            ways.append([])
        elif m.rank == 1 and m.op == "barrier":
            ways[-1].append({})
        elif m.rank == 1 and ways[-1]:
            ways[-1][-1].setdefault(m.op, []).append(m.nbytes)
    return dict(zip(WAYS, ways, strict=True))


EXACT = torch.stack([sum(gradient(step, rank) for rank in range(RANKS)) / RANKS for step in range(STEPS)])


def error(averaged: torch.Tensor) -> torch.Tensor:
    """Relative, of each step."""
    return (averaged - EXACT).norm(dim=1) / EXACT.norm(dim=1)


@pytest.mark.parametrize("name", ["none", "ring", "shared", "shared, views"])
def test_exact_hooks(found, name):
    torch.testing.assert_close(found[name], EXACT, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "eps"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_16_bits_round_and_no_more(found, name, eps):
    """N roundings to 16 bits, N divisions, N - 1 sums: each costs at most eps of what it works on."""
    room = 4 * eps * sum(torch.stack([gradient(s, r).abs() for s in range(STEPS)]) for r in range(RANKS)) + 1e-7
    assert ((found[name] - EXACT).abs() <= room).all()
    assert (error(found[name]) > eps / 10).all()  # it was really rounded


def test_bytes_of_each_hook(result, sent):
    tensors, buckets = len(SIZES), len(sent["none"][3]["all_reduce"])
    assert buckets > 1
    assert sum(sent["none"][3]["all_reduce"]) == 8 * NUMEL
    for name in ("fp16", "bf16"):
        assert sum(sent[name][3]["all_reduce"]) == 2 * NUMEL
    bits, at_most = sum(sent["onebit"][3]["all_gather"]), NUMEL / 8 + 8 * tensors + buckets
    assert NUMEL / 8 + 8 * tensors <= bits <= at_most and "all_reduce" not in sent["onebit"][3]
    assert sum(sent["ring"][3]["isend"]) == pytest.approx(result.results[1][2], abs=8 * 4 * buckets)
    assert set(sent["shared"][3]) == set()
    rank_1 = sum((rows + columns) for rows, columns in (SHAPES[0], SHAPES[2])) + SIZES[1] + SIZES[3]
    assert sum(sent["powersgd"][3]["all_reduce"]) == 8 * rank_1
    assert sum(sent["powersgd"][1]["all_reduce"]) == 8 * NUMEL  # it begins at step 2


def by_hand(feedback: bool = True, skip: int | None = None) -> torch.Tensor:
    """One bit an element, parameter by parameter, in one process."""
    left, rows = torch.zeros(RANKS, NUMEL, dtype=torch.float64), []
    for step in range(STEPS):
        wanted = torch.stack([gradient(step, rank) for rank in range(RANKS)]) + left
        scales = torch.cat([p.abs().mean(1, keepdim=True).expand_as(p) for p in wanted.split(SIZES, 1)], 1)
        sent = torch.where(wanted >= 0, scales, -scales)
        if step == skip:
            sent[:, : SIZES[0]] = torch.nan  # the parameter with the inf
            left[:, SIZES[0] :] = (wanted - sent)[:, SIZES[0] :]
        elif feedback:
            left = wanted - sent
        rows.append(sent.mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize("way", ["onebit", "views", "static", "from the first backward"])
def test_what_one_bit_loses_is_kept_for_the_next_step(found, way):
    """Also when DDP moves parameters to other buckets after the first backward."""
    torch.testing.assert_close(found[way], by_hand(), rtol=1e-10, atol=1e-12)


def test_without_feedback_it_is_lost(found):
    torch.testing.assert_close(found["forgets"], by_hand(feedback=False), rtol=1e-10, atol=1e-12)
    off = [(found[way].sum(0) - EXACT.sum(0)).norm() for way in ("onebit", "forgets")]
    assert off[0] < 0.8 * off[1]  # over all steps more has arrived, though each single step is further off


def test_an_infinite_gradient_spoils_its_step_and_no_other(found):
    want = by_hand(skip=1)
    assert not found["inf"][1, : SIZES[0]].isfinite().any()
    for step in (0, 2, 3, 4):
        torch.testing.assert_close(found["inf"][step], want[step], rtol=1e-10, atol=1e-12)


def test_powersgd_recovers_from_an_infinite_gradient(found):
    found = found["powersgd, inf"]
    assert not found[2].isfinite().all() and found[:2].isfinite().all() and found[3:].isfinite().all()


def test_powersgd_is_exact_until_it_begins_then_of_low_rank(found):
    assert (error(found["powersgd"])[:2] < 1e-12).all() and (error(found["powersgd"])[2:] > 0.1).all()
    matrix = found["powersgd"][3][: SIZES[0]].view(SHAPES[0])
    assert torch.linalg.matrix_rank(matrix) == 1
    vector = slice(SIZES[0], SIZES[0] + SIZES[1])
    torch.testing.assert_close(found["powersgd"][3][vector], EXACT[3][vector])


def test_fp16_ends_where_bf16_goes_on(result):
    fp16, bf16 = result.results[0][1]
    assert fp16[0] == pytest.approx(60_000, rel=2e-3) and fp16[1] == float("inf") and fp16[2] == 0
    assert bf16 == pytest.approx([60_000, 66_000, 1e-8], rel=1e-2)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 64, 1000])
def test_packing_is_lossless_and_an_eighth_of_a_byte(numel):
    signs, scale = torch.rand(numel) < 0.5, torch.tensor([0.1, 3.0], dtype=torch.float64)
    payload = pack(signs, scale)
    assert payload.dtype == torch.uint8 and payload.numel() == -(-numel // 8) + 16
    sizes = [numel // 3, numel - numel // 3]
    want = torch.cat([torch.full((n,), s, dtype=torch.float64) for n, s in zip(sizes, (0.1, 3.0), strict=True)])
    assert torch.equal(unpack(payload, sizes, torch.float64), torch.where(signs, want, -want))


def silent_neighbour() -> list[str]:
    """Rank 1 takes no part in a backward: what rank 0 is told, by gloo and by our own transport."""
    models = [
        wrap(nn.Linear(2, 2), torch.zeros(1, 2), DDPOptions(comm_hook=h, timeout_s=0.5)) for h in ("none", "shared")
    ]
    told = []
    for model in models:
        model(torch.ones(1, 2)).sum().backward()
    for model in models:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError) as caught:
                model(torch.ones(1, 2)).sum().backward()
            told.append(str(caught.value))
    dist.barrier()
    return told


def test_the_time_limit_of_gradients_is_that_of_the_options():
    by_gloo, by_own = run(silent_neighbour, 2, quiet=True).results[0]
    assert "Timed out" in by_gloo and "500ms" in by_gloo
    assert "rank 1" in by_own and "0.5 s" in by_own
