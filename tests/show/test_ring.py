"""show.ring: the right sums, steps, arrows, bytes and words, for a right ring and for wrong ones."""

import doctest
import sys
from xml.etree import ElementTree

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import run, show
from course_lib.collectives.tracked import Event, Track
from course_lib.launch.result import Result
from course_lib.show import ring_picture, ring_steps, ring_words
from course_lib.show.ring_steps import Story

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ring(tensor, again=False, shift=0):
    """In place. again: adds in the second phase, too; shift: what arrives goes to another chunk."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks, right, left = torch.tensor_split(tensor, size), (rank + 1) % size, (rank - 1) % size
    for phase in (0, 1):
        for step in range(size - 1):
            into = chunks[(rank + phase - step - 1 + shift) % size]
            buffer = torch.empty_like(into)
            sending = dist.isend(chunks[(rank + phase - step) % size], right)
            dist.recv(buffer, left)
            sending.wait()
            into.copy_(into + buffer if phase == 0 or again else buffer)


def to_root(tensor):
    """Everybody sends all to rank 0, which adds and sends it back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.empty_like(tensor)
    for other in range(1, size) if rank == 0 else ():
        dist.recv(buffer, other)
        tensor += buffer
    for other in range(1, size) if rank == 0 else ():
        dist.send(tensor, other)
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)


def on_copies(tensor):
    other = torch.empty_like(tensor)
    mine = tensor.clone()
    peer = 1 - dist.get_rank()
    works = [dist.isend(mine, peer), dist.irecv(other, peer)]
    for work in works:
        work.wait()
    mine += other
    tensor.copy_(mine / 2)


@pytest.fixture(scope="module")
def four():
    """One run of four ranks: name -> result as run(show.tracked(fn)) gives it."""

    def all_of_them():
        return {
            "right": show.tracked(ring)(),
            "uneven": show.tracked(ring, numel=10)(),
            "short": show.tracked(to_root, numel=3)(),
            "empty": show.tracked(to_root, numel=0)(),
            "again": show.tracked(ring, again=True)(),
            "shifted": show.tracked(ring, shift=1)(),
            "root": show.tracked(to_root)(),
        }

    r = run(all_of_them, ranks=4)
    return {name: _result([tracks[name] for tracks in r.results]) for name in r.results[0]}


def _result(tracks):
    return Result(tracks, [""] * len(tracks), [], 0.1)


@pytest.mark.parametrize("name", ["right", "uneven"])
def test_after_each_step_the_chunks_hold_what_theory_says(four, name):
    """Chunk (r - s) of rank r, after s steps, is the sum of the s + 1 ranks up to r; then finished ones go round."""
    story = Story(four[name].results)
    assert story.steps == 6
    for step in range(7):
        for rank in range(4):
            tensor = torch.tensor(story.tensor(rank, step), dtype=torch.float64)
            for chunk, part in enumerate(torch.tensor_split(tensor, 4)):
                added = (rank - chunk) % 4  # steps after which this chunk comes by in the first phase
                if added <= min(step, 3):
                    holds = {(rank - k) % 4 for k in range(added + 1)}
                else:
                    holds = {rank}
                if step > 3 and (rank + 1 - chunk) % 4 <= step - 3:
                    holds = {0, 1, 2, 3}
                assert part.tolist() == [float(sum(8**k for k in holds))] * len(part)


def test_moves_phases_and_bytes_of_a_ring(four):
    story = Story(four["right"].results)
    assert [story.phase(step) for step in range(1, 7)] == ["reduce-scatter"] * 3 + ["all-gather"] * 3
    for step in range(1, 7):
        begin = step - 1 if step <= 3 else step - 5
        moves = story.moves_of(step)
        assert [(m.src, m.dst, m.source, m.target) for m in moves] == [
            (rank, (rank + 1) % 4, (3 * ((rank - begin) % 4), 3), (3 * ((rank - begin) % 4), 3)) for rank in range(4)
        ]
        assert [story.sent(rank, step) for rank in range(4)] == [step * 24] * 4


def test_pictures_captions_and_text(four, drawn):
    stepper = show.ring(four["right"])
    assert len(stepper.frames) == len(stepper.captions) == 7
    assert "every rank holds the sum of all ranks in every chunk" in stepper.alt
    assert "sent 1.5 times the tensor; the ring needs 1.5" in stepper.alt
    told = stepper.captions[2]
    assert told.startswith("step 2 of 6, reduce-scatter: rank 0 sends chunk 3, the sum of ranks 0 and 3, to rank 1;")
    assert "rank 1 sends chunk 0, the sum of ranks 0 and 1, to rank 2" in told
    assert told.endswith("Sent so far: 48 B a rank.")
    picture = drawn(stepper.frames[2])
    assert {"rank 0", "rank 3", "chunk 0: 3 elements", "48 B of 144 B"} <= set(picture.texts)
    assert "rank 2 sends chunk 1, the sum of ranks 1 and 2, to rank 3" in picture.titles()
    assert "  rank 2  0+1+2  1+2   2     2" in str(stepper).splitlines()
    assert stepper.still.startswith(b"\x89PNG")


def test_stripes_stand_where_the_ranks_are(four):
    """Read from the SVG of step 1: on rank 1, chunk 0 holds the stripes of ranks 0 and 1, side by side."""
    boxes = {}
    for box in ElementTree.fromstring(show.ring(four["right"]).frames[1]).iter("{http://www.w3.org/2000/svg}rect"):
        boxes.setdefault(box.get("class"), []).append(tuple(float(box.get(k)) for k in ("x", "y", "width")))
    rows = sorted({y for _, y, _ in boxes["rank-0"] if y < max(y for _, y, _ in boxes["box"])})
    left, second, wide = min(box for box in boxes["box"] if box[1] == rows[1])
    inside = {k: [x for x, y, _ in boxes[f"rank-{k}"] if y == second and left <= x < left + wide] for k in range(4)}
    assert inside == {0: [left], 1: [pytest.approx(left + wide / 4, abs=0.2)], 2: [], 3: []}


def test_wrong_rings_are_drawn_and_said(four, drawn):
    again = show.ring(four["again"])
    assert "rank 0 holds the sum of ranks 0 (×2), 1, 2 and 3 in chunk 0" in again.alt
    assert "what arrives is added" in again.captions[4]
    assert "0×2" in drawn(again.frames[6]).texts
    shifted = show.ring(four["shifted"])
    assert "where it goes to chunk 1" in shifted.captions[1]
    assert "every rank holds the sum" not in shifted.alt


def test_another_algorithm_has_its_own_steps(four):
    """The root gets all at once, then sends one after the other: a logical clock finds it."""
    story = Story(four["root"].results)
    assert [[(m.src, m.dst) for m in story.moves_of(step)] for step in range(1, 5)] == [
        [(1, 0), (2, 0), (3, 0)], [(0, 1)], [(0, 2)], [(0, 3)],
    ]  # fmt: skip
    stepper = show.ring(four["root"])
    assert "The busiest rank sent 3 times the tensor" in stepper.alt
    assert "rank 1 sends the whole tensor, rank 1's own, to rank 0" in stepper.captions[1]


def test_values_that_are_no_sum_and_messages_that_nobody_took(drawn):
    """Made by hand: rank 0's message of one element is never received, and rank 1 ends with nonsense."""
    sent = Event(0, 0.0, 0, "send", 1, 2, 1, 8, [1.0], [1.0] * 4, [1.0] * 4)
    tracks = [Track(0, 2, 4, [1.0] * 4, [sent], [1.0] * 4, None, [("send", 1)])]
    tracks.append(Track(1, 2, 4, [8.0] * 4, [], [8.0, 0.3, float("nan"), 64.0], None, []))
    stepper = show.ring(Result(tracks, ["", ""], [], 0.1))
    assert "rank 0 holds rank 0's own in chunk 0" in stepper.alt
    assert "rank 0 sends element 2, rank 0's own, to rank 1, which never received it" in stepper.captions[1]
    picture = drawn(stepper.frames[1])
    assert "?" in picture.texts
    assert '<g class="cross">' in stepper.frames[1]


def test_examples_in_docstrings():
    for module in (ring_steps, ring_words):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


def test_short_and_empty_tensors(four):
    assert "every rank holds the sum" in show.ring(four["short"]).alt
    assert "every rank holds the sum" in show.ring(four["empty"]).alt


def test_many_ranks_copies_and_one_rank_alone(drawn, monkeypatch):
    r = run(show.tracked(ring), ranks=6)
    six = show.ring(r)
    assert len(six.frames) == 11
    assert "and 2 more messages" in six.captions[1]
    assert len(six.html) < 700_000  # a notebook keeps it
    assert "chunk" not in drawn(six.frames[1]).texts
    monkeypatch.setattr(ring_picture, "_HEADING", 1000)  # as with more ranks: there is no room for words
    assert "chunk" in drawn(show.ring(r).frames[1]).texts
    two = show.ring(run(show.tracked(on_copies), ranks=2))
    assert "worked on copies" in two.alt
    assert "At the end every rank holds the mean of all ranks in every chunk." in two.alt
    one = show.ring(run(show.tracked(to_root), ranks=1))
    assert "1 rank, 0 steps, 0 messages" in one.alt


def test_what_is_no_tracked_run_is_a_sentence(made):
    with pytest.raises(TypeError, match=r"run\(show.tracked\(my_all_reduce\), ranks=4\)"):
        show.ring(made.result(2, []))
