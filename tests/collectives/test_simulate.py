"""The simulator: hand-computed times, exact bytes, the same answer each time, and errors in words."""

import random
import threading

import pytest
import torch

from course_lib import show
from course_lib.collectives import halving, hierarchical, naive, ring, tree
from course_lib.collectives.simulate import SimulationError, simulate, simulate_all_reduce
from course_lib.collectives.topology import Link, Topology, cluster, flat

ALGORITHMS = {"ring": ring, "naive": naive, "tree": tree, "halving": halving, "hierarchical": hierarchical}


def options(name, ranks):
    return {"node_size": 2 if ranks % 2 == 0 else 1} if name == "hierarchical" else {}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_code_gives_right_values_and_exact_bytes(name):
    rng = random.Random(name)
    for ranks in (1, 2, 3, 4, 6, 7):
        numel = rng.choice([0, 1, ranks - 1, 5 * ranks + 1, 48])
        inputs = torch.randint(-9, 9, (ranks, numel), generator=torch.Generator().manual_seed(ranks))
        extra = options(name, ranks)

        def work(t, inputs=inputs, extra=extra):
            mine = inputs[t.rank].to(torch.float32)
            ALGORITHMS[name].all_reduce(mine, transport=t, **extra)
            return mine

        done = simulate(work, flat(ranks, 1e-5, 1e-9, 1e-10))
        for value in done.results:
            assert torch.equal(value.long(), inputs.sum(0))
        stated = [ALGORITHMS[name].sent(rank, numel, 4, ranks, **extra) for rank in range(ranks)]
        assert done.sent == stated
        assert [sum(m.nbytes for m in done.messages if m.rank == k and "send" in m.op) for k in range(ranks)] == stated


def test_two_messages_by_hand():
    def work(t):
        if t.rank == 0:
            t.send(torch.ones(25), 1)  # 100 B: 2 + 100 * 0.01 = 3 s
            t.send(torch.ones(50), 2)  # begins at 3 s: one message at a time; 2 + 2 = 4 s
        elif t.rank == 1:
            t.recv(torch.zeros(25), 0, "sum")  # and 100 * 0.001 s to add
        else:
            t.recv(torch.zeros(50), 0)
        return t.clock

    done = simulate(work, flat(3, alpha=2.0, beta=0.01, gamma=0.001))
    assert done.results == done.clocks == pytest.approx([7.0, 3.1, 7.0])
    assert done.seconds == pytest.approx(7.0)
    assert done.links == {(0, 1): 100, (0, 2): 200}
    assert done.uplinks == {}
    (_, late) = [m for m in done.messages if m.op == "send"]
    assert (late.start, late.end, late.nbytes, late.peer) == (pytest.approx(3.0), pytest.approx(7.0), 200, 2)
    assert late.where.startswith("test_simulate.py, line ")


def test_a_message_waits_for_its_receiver_and_carries_its_senders_clock():
    def work(t):
        token = torch.zeros(1)
        if t.rank == 0:
            t.recv(token, 1)  # 0 to 1 s, since beta is 0
            t.send(token, 2)  # 1 to 2 s: rank 2 cannot have it before, however early it calls
        elif t.rank == 1:
            t.send(token, 0)
            t.send(token, 2)  # ready at 1 s, but rank 2 takes it only after the one from rank 0: 2 to 3 s
        else:
            t.recv(token, 0)
            t.recv(token, 1)

    assert simulate(work, flat(3, 1.0, 0.0)).clocks == [2.0, 3.0, 3.0]


def test_an_exchange_goes_both_ways_at_once():
    def work(t):
        mine, other = torch.full((25,), t.rank + 1.0), torch.zeros(25)
        t.exchange(mine, 1 - t.rank, other, 1 - t.rank, "sum")
        return other.sum().item()

    done = simulate(work, flat(2, 2.0, 0.01, 0.001))
    assert done.results == [50.0, 25.0]
    assert done.clocks == pytest.approx([3.1, 3.1])


@pytest.mark.parametrize(("shared", "last"), [(True, 5.0), (False, 3.0)])
def test_a_shared_uplink_carries_one_message_at_a_time(shared, last):
    """Two ranks of node 0 send 100 B to node 1 at once; the latency of 1 s is not spent on the cable."""

    def work(t):
        (t.send if t.rank < 2 else t.recv)(torch.zeros(25), (t.rank + 2) % 4)

    done = simulate(work, cluster(2, 2, Link(0, 0), Link(1.0, 0.02), shared_uplink=shared))
    assert done.clocks == pytest.approx([3.0, last, 3.0, last])
    assert done.uplinks == {0: 200}


def test_ranks_in_a_bad_order_cross_the_uplink_more_often():
    near, far = Link(1e-6, 1e-10), Link(1e-6, 1e-8)
    good = simulate_all_reduce(ring.all_reduce, 4000, Topology((0, 0, 1, 1), near, far, shared_uplink=True))
    bad = simulate_all_reduce(ring.all_reduce, 4000, Topology((0, 1, 0, 1), near, far, shared_uplink=True))
    assert good.uplinks == {0: 24_000, 1: 24_000}  # 2(N-1)/N of 16,000 B
    assert bad.uplinks == {0: 48_000, 1: 48_000}
    assert bad.seconds > 1.5 * good.seconds


def test_the_same_each_time_and_without_data():
    where = cluster(3, 2, Link(1e-5, 1e-10), Link(5e-5, 4e-9), 2e-10)

    def work(t):
        mine = torch.ones(1001)
        hierarchical.all_reduce(mine, transport=t, node_size=2)

    first, second = simulate(work, where), simulate(work, where)
    light = simulate_all_reduce(hierarchical.all_reduce, 1001, where, node_size=2)
    assert first.messages and first.messages == second.messages
    assert first.clocks == second.clocks == light.clocks
    assert first.sent == light.sent


def test_a_simulation_can_be_drawn():
    picture = show.messages(simulate_all_reduce(ring.all_reduce, 3000, flat(3, 1e-3, 1e-6)))
    assert picture.captions[0].startswith("Who sent what to whom: 3 ranks, 12 messages; 48 kB sent")


def _send_first(t):
    t.send(torch.zeros(2), (t.rank + 1) % t.size)


def _one_leaves(t):
    if t.rank:
        t.exchange(torch.zeros(1), 0, torch.zeros(1), 0)


def _lengths(t):
    (t.send if t.rank else t.recv)(torch.zeros(3 + t.rank), 1 - t.rank)


def _raises(t):
    if t.rank:
        raise KeyError("lost")
    t.recv(torch.zeros(1), 1)


def _to_itself(t):
    t.send(torch.zeros(1), t.rank)


def _for_ever(t):
    while not released.wait(0.01):
        pass


released = threading.Event()


@pytest.mark.parametrize(
    ("fn", "ranks", "text"),
    [
        (_send_first, 2, r"rank 0 waits in send to rank 1 \(test_sim.*\); rank 1 waits in send to rank 0 \(test_sim"),
        (_one_leaves, 2, r"rank 0 has finished; rank 1 waits in isend to rank 0 .* and in irecv from rank 0"),
        (_lengths, 2, r"rank 1 sends 4 elements of float32 to rank 0 .*, which expects 3 elements of float32"),
        (_raises, 2, "rank 1 raised KeyError: 'lost'"),
        (_to_itself, 1, "no such other rank"),
        (_for_ever, 1, "has computed for 0.5 s without a message"),
    ],
)
def test_what_goes_wrong_is_said(fn, ranks, text):
    released.clear()
    try:
        with pytest.raises(SimulationError, match=text):
            simulate(fn, flat(ranks, 1.0, 1.0), patience=0.5 if fn is _for_ever else 60.0)
    finally:
        released.set()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    for thread in left:
        thread.join(timeout=10)
    assert not [thread for thread in left if thread.is_alive()]
    assert fn is _for_ever or not left


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: flat(0, 1, 1), "ranks must be a whole number, 1 or more, not 0"),
        (lambda: flat(2, -1, 1), "alpha must be a number of seconds, 0 or more, not -1"),
        (lambda: flat(2, 1, float("nan")), "beta must be"),
        (lambda: flat(2, 1, 1, -1), "gamma must be"),
        (lambda: cluster(2, 1.5, Link(0, 0), Link(0, 0)), "per_node must be a whole number"),
        (lambda: Topology((), Link(0, 0), Link(0, 0)), "at least one rank"),
    ],
)
def test_topologies_that_cannot_be(make, text):
    with pytest.raises(ValueError, match=text):
        make()
