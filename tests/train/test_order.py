"""The order of an epoch: the same for every world size and in every process. (More of it in test_pure.py.)"""

import os
import sys
from itertools import zip_longest

import cloudpickle
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from course_lib import run
from course_lib.train.order import Order, epoch_order, share

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

numbers = st.integers(0, 2**31)


@given(numbers, st.integers(0, 1000), st.integers(0, 150), st.integers(1, 9))
def test_dealt_and_collected_it_is_a_permutation(seed, epoch, samples, ranks):
    """Collected card by card, the shares of any number of ranks are the one order of the epoch."""
    order = epoch_order(seed, epoch, samples)
    hands = [share(order, rank, ranks).tolist() for rank in range(ranks)]
    collected = [card for trick in zip_longest(*hands) for card in trick if card is not None]
    assert collected == order.tolist()
    assert sorted(collected) == list(range(samples))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@given(numbers, st.integers(1, 120), st.integers(1, 40), st.integers(1, 9))
def test_an_epoch_is_the_order_cut_into_steps(seed, samples, batch, ranks):
    """Also where the global batch is not divisible by the ranks, and where some rank has nothing."""
    plan = Order(seed, samples, batch)
    for epoch in (1, 2):
        steps = (plan.per_epoch * (epoch - 1) + 1, plan.per_epoch * epoch)
        by_rank = [list(plan.keys(rank, ranks, *steps)) for rank in range(ranks)]
        together = []
        for step, hands in enumerate(zip(*by_rank, strict=True), steps[0]):
            trick = [key for row in zip_longest(*hands) for key in row if key is not None]
            assert len(trick) == plan.count(step)
            assert {len(hand) for hand in hands} <= plan.share_sizes(ranks)
            together += trick
        assert together == [(epoch, index) for index in epoch_order(seed, epoch, samples).tolist()]


@given(st.sets(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=40))
def test_no_two_pairs_of_seed_and_epoch_share_an_order(pairs):
    """torch's DistributedSampler adds them: there (0, 1) is (1, 0)."""
    assert len({epoch_order(seed, epoch, 30).tobytes() for seed, epoch in pairs}) == len(pairs)


def test_the_order_is_known_for_ever():
    """A run that is resumed with another NumPy or on another machine goes on with the same samples."""
    assert epoch_order(0, 1, 13).tolist() == [4, 1, 12, 7, 11, 2, 8, 0, 9, 10, 5, 3, 6]
    assert list(Order(7, 10, 4).keys(1, 2, 2, 4)) == [[(1, 0), (1, 3)], [(1, 6)], [(2, 7), (2, 9)]]


def test_every_sample_comes_to_every_place():
    """Over many epochs a sample's mean place is the middle, within five standard errors; so on which rank it is."""
    epochs, samples = 600, 40
    places = np.array([np.argsort(epoch_order(3, epoch, samples)) for epoch in range(epochs)])
    error = np.sqrt((samples**2 - 1) / 12 / epochs)
    assert np.abs(places.mean(0) - (samples - 1) / 2).max() < 5 * error
    on_rank_0 = (places % 4 == 0).mean(0)
    assert np.abs(on_rank_0 - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / epochs)


def in_a_rank():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    np.random.rand(rank)  # no global generator may matter
    before = np.random.get_state()[1].tolist()
    keys = list(Order(5, 23, 6).keys(rank, ranks, 1, 8))
    return keys, before == np.random.get_state()[1].tolist()


def test_processes_agree_without_a_word():
    r = run(in_a_rank, 3)
    assert r.messages == []
    assert all(untouched for _, untouched in r.results)
    for step, whole in enumerate(Order(5, 23, 6).keys(0, 1, 1, 8)):
        assert sorted(whole) == sorted(key for keys, _ in r.results for key in keys[step])
