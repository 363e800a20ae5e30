"""What lesson 08 says of torch's own tools: a new version of torch that does otherwise must be noticed."""

import os
import sys
import warnings
from itertools import chain

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from course_lib import run
from course_lib.train.order import share

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file


def samplers(samples, ranks, **options):
    return [DistributedSampler(range(samples), ranks, rank, **options) for rank in range(ranks)]


@given(st.integers(1, 80), st.integers(1, 9), st.booleans())
def test_padding_and_dropping(samples, ranks, drop_last):
    """All ranks have equally many: the first of the order once more, or the last left out."""
    if samples < ranks and drop_last:
        return
    hands = [list(sampler) for sampler in samplers(samples, ranks, drop_last=drop_last)]
    each = samples // ranks if drop_last else -(-samples // ranks)
    assert [len(hand) for hand in hands] == [each] * ranks
    together = [card for trick in zip(*hands, strict=True) for card in trick]
    if drop_last:
        assert len(set(together)) == len(together) == each * ranks
    else:
        order, extra = together[:samples], together[samples:]
        assert sorted(order) == list(range(samples))
        assert extra == (order * ranks)[: len(extra)]


def test_set_epoch_changes_the_order_and_not_who_shares_what():
    forgotten = [[list(sampler), list(sampler)] for sampler in samplers(40, 2)]
    assert all(first == second for first, second in forgotten)
    called = samplers(40, 2)
    epochs = []
    for epoch in range(2):
        for sampler in called:
            sampler.set_epoch(epoch)
        epochs.append([list(sampler) for sampler in called])
        assert sorted(chain(*epochs[-1])) == list(range(40))
    assert epochs[0] != epochs[1]
    assert not hasattr(called[0], "state_dict")


def test_seed_and_epoch_are_added():
    one, other = samplers(40, 1, seed=0)[0], samplers(40, 1, seed=1)[0]
    one.set_epoch(1)
    assert list(one) == list(other)


def test_with_seeds_by_rank_samples_are_lost():
    seen = [index for rank in range(4) for index in DistributedSampler(range(100), 4, rank, seed=rank)]
    assert len(seen) == 100 > len(set(seen))


def test_a_stream_takes_no_sampler():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    with pytest.raises(ValueError, match="expected unspecified sampler option"):
        DataLoader(Stream(), sampler=DistributedSampler(range(4), 2, 0))


def test_a_loader_knows_only_its_own_workers():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for workers, says in ((cores, 0), (cores + 1, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DataLoader(range(4), num_workers=workers)
        assert len(caught) == says


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.random.rand(), torch.rand(()).item()


DATA = torch.arange(1.0, 6.0, dtype=torch.float64)


def uneven(enable, **options):
    """Shares of 2, 2 and 1 sample; the loss is x times w. Returns weight, momentum, and what was counted."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    nn.init.zeros_(model.module.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    with Join([model], enable=enable, **options):
        for x in share(DATA, dist.get_rank(), 3):
            model(x.reshape(1, 1)).sum().backward()
            sgd.step()
            sgd.zero_grad()
    return model.module.weight.item(), sgd.state[model.module.weight]["momentum_buffer"].item()


def ranks_of_torch():
    """In a rank: everything that needs processes."""
    torch.manual_seed(0)
    loader = DataLoader(Drawn(), batch_size=2, num_workers=2, collate_fn=list) if dist.get_rank() < 2 else []
    drawn = [pair for batch in loader for pair in batch]
    return drawn, uneven(True), uneven(True, divide_by_initial_world_size=False)


@pytest.fixture(scope="module")
def told():
    return run(ranks_of_torch, 3, quiet=True)


def test_workers_of_a_rank_differ_and_ranks_with_one_seed_do_not(told):
    zero, one = (told.results[rank][0] for rank in (0, 1))
    assert len({number for number, _ in zero}) == len({number for _, number in zero}) == 4
    assert zero == one


@pytest.mark.parametrize(("way", "second"), [(1, (4 + 5) / 3), (2, (4 + 5) / 2)])
def test_join_divides_by_all_or_by_those_who_are_there(told, way, second):
    """Gradient x, momentum 0.5, rate 1: w = -g1 - (g2 + g1 / 2)."""
    first = (1 + 2 + 3) / 3
    weights = [result[way][0] for result in told.results]
    assert weights == [pytest.approx(-first - (second + first / 2))] * 3


@pytest.mark.parametrize(("way", "second"), [(1, (4 + 5) / 3), (2, (4 + 5) / 2)])
def test_join_gives_the_weights_to_all_but_not_the_momentum(told, way, second):
    momentum = [result[way][1] for result in told.results]
    assert momentum[:2] == [pytest.approx(second + 1)] * 2
    assert momentum[2] == pytest.approx(2)  # as it was when this rank was through
