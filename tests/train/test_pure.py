"""Order, rate, stop rule, randomness: pure functions, by doctest and by property."""

import doctest
import importlib
import math
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.train import batches
from course_lib.train.data import test_keys as keys_of_test
from course_lib.train.errors import ConfigError
from course_lib.train.model import ModelConfig, build
from course_lib.train.optim import OptimConfig, set_rate
from course_lib.train.order import Order, epoch_order, share
from course_lib.train.placement import check, place
from course_lib.train.prepare import even
from course_lib.train.schedule import due, rate

settings.register_profile("patient", deadline=None)  # a time limit would fail on a busy machine
settings.load_profile("patient")
MODULES = ["batches", "order", "schedule", "randomness", "stopping", "folder", "status", "sources", "data", "cli"]
MODULES += ["flight", "launches", "pace"]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    found = doctest.testmod(importlib.import_module(f"course_lib.train.{name}"))
    assert found.attempted > 0
    assert found.failed == 0


orders = st.builds(
    Order,
    seed=st.integers(0, 2**31),
    samples=st.integers(1, 200),
    global_batch=st.integers(1, 60),
    drop_last=st.booleans(),
).filter(lambda order: order.per_epoch > 0)


@given(orders, st.integers(1, 7), st.integers(1, 4))
def test_each_sample_once_an_epoch(order, ranks, epoch):
    first = (epoch - 1) * order.per_epoch + 1
    last = epoch * order.per_epoch
    seen = []
    for rank in range(ranks):
        for batch in order.keys(rank, ranks, first, last):
            assert all(key[0] == epoch for key in batch)
            seen += [index for _, index in batch]
    assert len(seen) == len(set(seen))
    expected = order.samples if not order.drop_last else order.samples // order.global_batch * order.global_batch
    assert len(seen) == expected
    assert expected == sum(order.count(step) for step in range(first, last + 1))


@given(orders, st.integers(2, 7))
def test_a_step_has_the_same_samples_for_every_world_size(order, ranks):
    steps = (1, 2 * order.per_epoch)
    alone = list(order.keys(0, 1, *steps))
    dealt = [list(order.keys(rank, ranks, *steps)) for rank in range(ranks)]
    for step, whole in enumerate(alone):
        assert sorted(whole) == sorted(key for rank in range(ranks) for key in dealt[rank][step])
        sizes = [len(dealt[rank][step]) for rank in range(ranks)]
        assert max(sizes) - min(sizes) <= 1
        assert len(whole) == order.count(step + 1)


@given(orders, st.integers(1, 4), st.data())
def test_starting_in_the_middle_changes_nothing(order, ranks, data):
    total = 3 * order.per_epoch
    first = data.draw(st.integers(1, total))
    rank = data.draw(st.integers(0, ranks - 1))
    assert list(order.keys(rank, ranks, 1, total))[first - 1 :] == list(order.keys(rank, ranks, first, total))


def test_epochs_and_seeds_differ():
    assert not np.array_equal(epoch_order(0, 1, 100), epoch_order(0, 2, 100))
    assert not np.array_equal(epoch_order(0, 1, 100), epoch_order(1, 1, 100))
    assert np.array_equal(epoch_order(5, 3, 100), epoch_order(5, 3, 100))


@given(st.integers(1, 50), st.integers(1, 7), st.integers(1, 9))
def test_test_samples_are_shared_without_padding(samples, ranks, batch):
    seen = [key for rank in range(ranks) for part in keys_of_test(samples, batch, rank, ranks) for key in part]
    assert sorted(seen) == [(0, index) for index in range(samples)]


@given(st.integers(1, 300), st.integers(0, 300), st.floats(0, 1))
def test_rate(total, warmup, final):
    warmup = min(warmup, total)
    rates = [rate(step, total, 0.4, warmup, final) for step in range(1, total + 1)]
    assert all(0 < value <= 0.4 + 1e-12 for value in rates)
    assert max(rates) == pytest.approx(0.4)
    assert rates[:warmup] == pytest.approx([0.4 * (i + 1) / warmup for i in range(warmup)])
    after = rates[max(warmup - 1, 0) :]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    if warmup == 0 and total > 2:
        middle = rate(1 + total // 2, 2 * (total // 2), 1.0) if total > 3 else 0.5  # half of the way, half the rate
        assert middle == pytest.approx(0.5)


def test_rate_against_torch():
    """torch's own cosine, one step shifted, is the oracle without a warm-up."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for step in range(1, 41):
        assert rate(step, 40, 0.3) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        cosine.step()


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 40))
def test_due_ends_every_epoch_and_the_run(every, per_epoch, total):
    days = [step for step in range(1, total + 1) if due(step, every, per_epoch, total)]
    assert total in days
    assert set(range(per_epoch, total + 1, per_epoch)) <= set(days)
    if every:
        assert set(range(every, total + 1, every)) <= set(days)


def test_share_deals_like_cards():
    assert [share(np.arange(7), rank, 3).tolist() for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert math.prod(len(share(np.arange(2), rank, 3)) for rank in range(3)) == 0  # one goes without


@given(st.integers(0, 200), st.integers(0, 20), st.integers(0, 8), st.integers(1, 8))
def test_batch_sizes_are_one_product(global_batch, batch, accumulate, ranks):
    try:
        whole, part, times = batches.settle(global_batch, batch, accumulate, ranks)
    except ConfigError as error:
        assert str(error).endswith(".")
        possible = [
            (b, a)
            for b in range(1, 201)
            for a in range(1, 201)
            if b * a * ranks == global_batch and b == (batch or b) and a == (accumulate or (a if batch else 1))
        ]
        assert not possible
        return
    assert whole == part * times * ranks
    assert (whole, part, times) == (global_batch or whole, batch or part, accumulate or times)
    if not batch and not accumulate:
        assert times == 1


@given(st.integers(0, 100), st.integers(1, 30))
def test_microbatches_hold_each_sample_once(share, batch):
    cut = batches.pieces(list(range(share)), batch)
    assert list(chain(*cut)) == list(range(share))
    assert len(cut) == batches.microbatches(share, batch)
    assert {len(piece) for piece in cut} == batches.sizes(share, batch)
    assert all(len(piece) == batch for piece in cut[:-1])


RATES = [  # optimizer, rate for 256, global batch, rates of 8 steps, 4 of warm-up; by hand: 1/2 (1 + cos(k pi / 5))
    ("sgd", 0.1, 256, [0.025, 0.05, 0.075, 0.1, 0.0904508, 0.0654508, 0.0345492, 0.0095492]),
    ("sgd", 0.1, 1024, [0.1, 0.2, 0.3, 0.4, 0.3618034, 0.2618034, 0.1381966, 0.0381966]),
    ("sgd", 0.1, 128, [0.0125, 0.025, 0.0375, 0.05, 0.0452254, 0.0327254, 0.0172746, 0.0047746]),
    ("adamw", 0.1, 1024, [0.05, 0.1, 0.15, 0.2, 0.1809017, 0.1309017, 0.0690983, 0.0190983]),
    ("adamw", 0.1, 64, [0.0125, 0.025, 0.0375, 0.05, 0.0452254, 0.0327254, 0.0172746, 0.0047746]),
]


@pytest.mark.parametrize(("optimizer", "lr", "global_batch", "wanted"), RATES)
def test_rate_table(optimizer, lr, global_batch, wanted):
    import torch

    config = OptimConfig(optimizer, lr=lr, reference_batch=256, epochs=2, warmup_epochs=1)
    real = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    rates = [set_rate(config, real, step, 8, 4, global_batch) for step in range(1, 9)]
    assert rates == pytest.approx(wanted, abs=5e-8)
    assert real.param_groups[0]["lr"] == rates[-1]


EVEN = [  # samples, global batch, batch, ranks; whether each rank has as many microbatches, none empty
    (96, 48, 8, 3, True),
    (100, 48, 4, 3, True),  # the tail: 2, 1 and 1 samples
    (100, 48, 1, 3, False),  # the same, one at a time
    (97, 48, 4, 3, False),  # the tail: one sample for three ranks
]


@pytest.mark.parametrize(("samples", "global_batch", "batch", "ranks", "wanted"), EVEN)
def test_even_microbatches(samples, global_batch, batch, ranks, wanted):
    assert even(Order(0, samples, global_batch), batch, ranks) is wanted
    assert even(Order(0, samples, global_batch, drop_last=True), batch, ranks)


def test_sync_batchnorm_keeps_the_keys():
    """It runs on GPUs only; here only the exchange of the layers is looked at."""
    import torch

    config = ModelConfig(norm="batch", sync_batchnorm=True)
    net = build(config, (1, 8, 8), 10, seed=0)
    keys = list(net.state_dict())
    placed = place(net, config, torch.device("cpu"))
    assert sum(isinstance(layer, torch.nn.SyncBatchNorm) for layer in placed) == 2
    assert list(placed.state_dict()) == keys
    with pytest.raises(ConfigError, match=r"use --data\.drop_last\."):
        check(config, placed, torch.device("cuda"), even=False)
    check(config, placed, torch.device("cuda"), even=True)
