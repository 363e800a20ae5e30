"""tracked(fn): who is in which sum, what was sent, and where it lay; for right, wrong and asynchronous answers."""

import pickle
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import run
from course_lib.collectives.tracked import Track, ranks_in, tracked

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("times", [{}, {0: 1}, {3: 1, 1: 2}, {16: 7, 0: 7}, dict.fromkeys(range(17), 1)])
def test_ranks_in_reads_what_was_added(times):
    total = torch.zeros((), dtype=torch.float64)
    for rank, count in times.items():
        for _ in range(count):
            total += 8.0**rank
    assert ranks_in(total.item()) == times


@pytest.mark.parametrize("value", [-1.0, 0.25, float("nan"), float("inf"), 8.0**17])
def test_ranks_in_knows_what_is_no_sum(value):
    assert ranks_in(value) is None


def circle(tensor):
    """Everybody adds what the left neighbour has; the buffer is no part of the tensor."""
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.empty_like(tensor)
    arriving = dist.irecv(buffer, (rank - 1) % size)
    leaving = dist.isend(tensor, (rank + 1) % size)
    arriving.wait()
    leaving.wait()
    tensor += buffer


def wrong(tensor):
    """Each rank in turn adds its tensor twice to the next rank's first two elements; the rest stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(2 * (size - 1)):
        if step % (size - 1) == rank:
            dist.send(tensor[1:3], rank + 1)
        elif step % (size - 1) == rank - 1:
            buffer = torch.empty(2, dtype=tensor.dtype)
            dist.recv(buffer, rank - 1)
            tensor[:2] += buffer


def in_place(tensor):
    """Rank 1 receives straight into the middle of the tensor, in one batch with a send of its end."""
    rank = dist.get_rank()
    if rank == 1:
        calls = [dist.P2POp(dist.irecv, tensor[2:4], 0), dist.P2POp(dist.isend, tensor[5:], 0)]
    else:
        calls = [dist.P2POp(dist.isend, tensor[2:4], 1), dist.P2POp(dist.irecv, tensor[:1], 1)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return tensor + 1


kept = []


def nobody_waits(tensor):
    if dist.get_rank() == 0:
        kept.append(dist.isend(tensor, 1))  # without a handle gloo drops the message
    else:
        dist.recv(tensor)


@pytest.fixture(scope="module")
def tracks():
    """Two runs for all of them."""

    def three():
        return {fn.__name__: tracked(fn, numel=6)() for fn in (circle, wrong)}

    def two():
        return {fn.__name__: tracked(fn, numel=6)() for fn in (in_place, nobody_waits)}

    found = [run(three, ranks=3).results, run(two, ranks=2).results]
    return {name: [rank[name] for rank in results] for results in found for name in results[0]}


def test_asynchronous_calls(tracks):
    for rank, track in enumerate(tracks["circle"]):
        left, right = (rank - 1) % 3, (rank + 1) % 3
        assert track.start == [8.0**rank] * 6
        send, recv = track.events
        assert (send.kind, send.peer, send.offset, send.length, send.nbytes) == ("send", right, 0, 6, 48)
        assert (recv.kind, recv.peer, recv.offset, recv.length) == ("recv", left, None, 6)
        assert send.payload == [8.0**rank] * 6
        assert recv.payload == [8.0**left] * 6
        assert recv.state == [8.0**rank] * 6  # not added yet
        assert recv.after == track.end == [8.0**rank + 8.0**left] * 6
        assert track.open_calls == []


def test_double_counts_and_blanks(tracks):
    middle = tracks["wrong"][1]
    assert [(e.kind, e.peer, e.offset, e.length) for e in middle.events] == [
        ("recv", 0, None, 2), ("send", 2, 1, 2), ("recv", 0, None, 2), ("send", 2, 1, 2),
    ]  # fmt: skip
    assert [ranks_in(value) for value in middle.end] == [{0: 2, 1: 1}] * 2 + [{1: 1}] * 4
    last = tracks["wrong"][2]  # element 0 got rank 1's element 1, which had rank 0 in it once, then twice
    assert [ranks_in(value) for value in last.end] == [{0: 3, 1: 2, 2: 1}, {1: 2, 2: 1}] + [{2: 1}] * 4
    assert [event.order for event in last.events] == [0, 1]
    assert last.events[0].time < last.events[1].time


def test_buffers_inside_the_tensor(tracks):
    zero, one = tracks["in_place"]
    assert {(e.kind, e.offset, e.length) for e in one.events} == {("recv", 2, 2), ("send", 5, 1)}
    assert {(e.kind, e.offset, e.length) for e in zero.events} == {("send", 2, 2), ("recv", 0, 1)}
    assert one.end == [8.0, 8.0, 1.0, 1.0, 8.0, 8.0]
    assert one.returned == [9.0, 9.0, 2.0, 2.0, 9.0, 9.0]  # another tensor than the one that was given


def test_a_call_that_nobody_waits_for_and_a_receive_from_anyone(tracks):
    zero, one = tracks["nobody_waits"]
    assert zero.open_calls == [("send", 1)]
    assert [(e.kind, e.peer, e.payload) for e in one.events] == [("recv", None, [1.0] * 6)]


def test_plain_data(tracks):
    track = tracks["circle"][0]
    assert isinstance(track, Track)
    assert pickle.loads(pickle.dumps(track)) == track


def test_a_length_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="give 0 to 4096 elements"):
        tracked(circle, numel=5000)
