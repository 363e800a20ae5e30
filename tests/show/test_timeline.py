"""show.timeline and show.overlap: numbers of runs that are known exactly, and what must hold in real ones."""

import io
import math
import re
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from course_lib import run, show
from course_lib.collectives import Communicator
from course_lib.launch.result import Message, Result
from course_lib.parallel import OverlappedDDP
from course_lib.parallel.phases import Span
from course_lib.parallel.profiled import Call, Profile

cloudpickle.register_pickle_by_value(sys.modules[__name__])
MS = 1e-3
BEGIN = 500.0  # of the profiles, on the clock of the machine; the messages count from 20 ms before it


def profile(rank, compute=(), communication=(), calls=(), backwards=(), steps=((0, 60),), gpu=False):
    """A Profile from whole milliseconds after BEGIN."""

    def at(ms):
        return BEGIN + ms * MS

    return Profile(
        rank=rank, turn=0, begin=BEGIN, end=at(steps[-1][1]), steps=[(at(a), at(b)) for a, b in steps],
        compute=[Span(kind, at(a), at(b)) for kind, a, b in compute],
        communication=[Span(kind, at(a), at(b)) for kind, a, b in communication],
        calls=[Call(op, n, at(a), at(b), computing) for op, n, a, b, computing in calls],
        backwards=[(at(a), at(b)) for a, b in backwards], gpu=gpu, value=None,
    )  # fmt: skip


def message(rank, a, b, op="all_reduce", nbytes=4000, ranks=(0, 1), peer=None):
    end = None if b is None else (b + 20) * MS
    return Message(rank, op, peer, nbytes, (a + 20) * MS, end, "Cell In[3], line 4", ranks=ranks)


def result(profiles, messages):
    ranks = tuple(range(len(profiles)))
    meet = [Message(r, "barrier", None, 0, 0.019, 0.02, "profiled.py, line 9", ranks=ranks) for r in ranks]
    return Result(profiles, [""] * len(ranks), [*meet, *messages], 0.1)


@pytest.fixture
def two():
    """Rank 1 comes 6 ms late to the first of two all-reduces, which overlap on rank 0."""
    first = [("forward", 0, 10), ("backward", 10, 30), ("other", 45, 46), ("optimizer", 50, 60)]
    second = [("forward", 0, 10), ("backward", 16, 36), ("optimizer", 50, 60)]
    calls = [message(0, 20, 40), message(1, 26, 40), message(0, 28, 44), message(1, 30, 45)]
    return result([profile(0, first, backwards=[(10, 42)]), profile(1, second, backwards=[(16, 46)])], calls)


def test_numbers_of_a_known_run(two):
    found = show.overlap(two)
    ms = {k: round(v / MS, 6) for k, v in vars(found[0]).items() if isinstance(v, float)}
    assert ms == {
        "step": 60, "compute": 41, "communication": 24, "waiting": 6, "transfer": 18, "overlapped": 10, "exposed": 14,
        "inside_backward": 22, "kept": 0,
    }  # fmt: skip
    assert found[0].kinds == pytest.approx({"forward": 0.01, "backward": 0.02, "optimizer": 0.01, "other": 0.001})
    assert (found[1].waiting, found[1].transfer) == pytest.approx((0, 0.019))
    # Bucket 2 waits from 28 to 30, too; that belongs to the 8 ms for which rank 0 waited for rank 1.
    assert (found[1].kept, found[1].last, found.straggler) == (pytest.approx(0.008), 2, 1)
    assert found[0].share == pytest.approx(10 / 24)


PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p))), max_size=5)


@st.composite
def runs(draw):
    """Two or three ranks; the k-th all-reduce of each belongs together and ends after the last has come."""
    ranks, calls = draw(st.integers(2, 3)), draw(st.integers(0, 4))
    compute = [draw(PIECES) for _ in range(ranks)]
    starts = [sorted(draw(st.lists(st.integers(0, 40), min_size=calls, max_size=calls, unique=True)))
              for _ in range(ranks)]  # fmt: skip
    ends = [[max(s[k] for s in starts) + draw(st.integers(1, 15)) for k in range(calls)] for _ in range(ranks)]
    return compute, starts, ends


@given(runs())
@settings(max_examples=60, deadline=None)
def test_numbers_against_a_grid(drawn):
    """The other way to compute: millisecond by millisecond."""
    compute, starts, ends = drawn
    ranks, group = range(len(compute)), tuple(range(len(compute)))
    profiles = [profile(r, [("forward", *piece) for piece in compute[r]]) for r in ranks]
    calls = [message(r, a, b, ranks=group) for r in ranks for a, b in zip(starts[r], ends[r], strict=True)]
    found = show.overlap(result(profiles, calls))
    for r in ranks:
        busy = {ms for a, b in compute[r] for ms in range(a, b)}
        talk, moving = set(), set()
        for k, (a, b) in enumerate(zip(starts[r], ends[r], strict=True)):
            talk |= set(range(a, b))
            moving |= set(range(max(s[k] for s in starts), b))
        right = [len(busy), len(talk), len(talk - moving), len(moving), len(talk & busy), len(talk - busy)]
        names = ["compute", "communication", "waiting", "transfer", "overlapped", "exposed"]
        assert [getattr(found[r], name) / MS for name in names] == pytest.approx(right, abs=1e-6)
        assert found[r].step == pytest.approx(0.06)


def test_the_end_is_the_earlier_of_what_wait_and_the_backend_say():
    calls = [message(0, 10, 50), message(1, 10, 22), message(0, 30, None), message(1, 30, 40)]
    spans = [("all_reduce", 10, 20), ("all_reduce", 30, 35)], [("all_reduce", 10, 21), ("all_reduce", 30, 45)]
    found = show.overlap(result([profile(r, communication=spans[r]) for r in range(2)], calls))
    assert [t.communication for t in found] == pytest.approx([0.015, 0.021])


def test_a_call_of_several_collectives_and_one_that_no_profiler_saw():
    """all_gather_object is two all-gathers; the last call ran on a thread of its own."""
    calls = [message(r, a, b, op) for r in range(2) for a, b, op in [(5, 19, "all_gather_object"), (40, 45, "barrier")]]
    spans = [("all_gather", 6, 9), ("all_gather", 10, 18), ("all_gather", 10, 17)]
    found = show.overlap(result([profile(r, communication=spans) for r in range(2)], calls))
    assert [t.communication for t in found] == pytest.approx([0.018, 0.018])


def test_on_a_gpu_the_kernels_tell_when():
    calls = [message(r, 5 + r, 6) for r in range(2)]
    kernels = [[("all_reduce", 20, 30)], [("all_reduce", 24, 30)]]
    found = show.overlap(result([profile(r, communication=kernels[r], gpu=True) for r in range(2)], calls))
    assert [(t.waiting, t.transfer) for t in found] == [pytest.approx((0.004, 0.006)), pytest.approx((0, 0.006))]


def test_without_messages_the_profile_suffices():
    profiles = [profile(r, communication=[("all_reduce", 10 + r, 20)]) for r in range(2)]
    found = show.overlap(Result(profiles, ["", ""], [], 0.1))
    assert [(t.waiting, t.transfer) for t in found] == [pytest.approx((0.001, 0.009)), pytest.approx((0, 0.009))]


def test_communicators_count_and_hide_their_own_messages():
    calls = [("all_reduce", 4000, 10, 30, False)]
    inner = [message(0, 12, 20, "isend", peer=1), message(1, 12, 20, "irecv", peer=0)]
    outer = [message(1, 40, 50, "isend", peer=0), message(0, 44, 50, "recv", peer=1)]
    picture = show.timeline(result([profile(r, calls=calls) for r in range(2)], [*inner, *outer]))
    assert len(picture.captions) == 3
    assert picture.captions[1].startswith("1. all_reduce 4 kB (Communicator)")
    assert "rank 1 sends 4 kB to rank 0" in picture.captions[2]
    assert [t.communication for t in picture.numbers] == pytest.approx([0.026, 0.03])
    assert [t.waiting for t in picture.numbers] == pytest.approx([0, 0.004])


def test_the_root_of_a_broadcast_keeps_the_others_waiting_and_a_late_receiver_nobody():
    calls = [message(0, 20, 25, "broadcast", peer=0), message(1, 10, 25, "broadcast", peer=0)]
    assert [t.waiting for t in show.overlap(result([profile(0), profile(1)], calls))] == pytest.approx([0, 0.01])
    calls = [message(0, 10, 25, "broadcast", peer=0), message(1, 20, 25, "broadcast", peer=0)]
    assert [t.waiting for t in show.overlap(result([profile(0), profile(1)], calls))] == pytest.approx([0, 0])


def test_steps():
    """The last, some, all; a call that is only noted late to have ended is no part of the next step."""
    steps = [(0, 100), (100, 200), (200, 300)]
    calls = [message(r, *at) for r in range(2) for at in [(80, 101), (180, 190), (280, 290)]]
    r = result([profile(k, [("forward", 100, 150)], steps=steps) for k in range(2)], calls)
    assert [show.overlap(r, steps=n)[0].communication for n in (1, 2, 3, 9, None)] == pytest.approx(
        [0.01, 0.01, 0.041 / 3, 0.041 / 3, 0.041]
    )
    assert [show.overlap(r, steps=n)[0].compute for n in (1, 2, None)] == pytest.approx([0, 0.025, 0.05])
    assert "the last 2 steps" in show.timeline(r, steps=2).captions[0]
    assert repr(show.overlap(r, steps=9)).startswith("ms a step")
    assert repr(show.overlap(r, steps=None)).startswith("ms in all")
    assert "All takes 300 ms" in show.timeline(r, steps=None).alt


def x_of(picture, ms):
    """Pixels of a moment, by the labels of the axis: the lowest row of numbers."""
    numbers = [(text, at) for text, at in picture.texts.items() if re.fullmatch(r"[\d.]+", text or "")]
    low = max(y for _, (_, y) in numbers)
    marks = sorted((float(text), x) for text, (x, y) in numbers if y == low)
    (a, xa), (b, xb) = marks[0], marks[-1]
    return xa + (ms - a) / (b - a) * (xb - xa)


def test_the_picture(two, drawn):
    shown = show.timeline(two)
    picture = drawn(shown.frames[0])
    waits = sorted((x, x + width, step) for x, _, width, _, step in picture.rects("wait"))
    right = sorted([(20, 26, 1), (28, 30, 2)])
    for (a, b, step), (x, end, its) in zip(right, waits, strict=True):
        assert (x, end, its) == (
            pytest.approx(x_of(picture, a), abs=0.5),
            pytest.approx(x_of(picture, b), abs=0.5),
            step,
        )
    assert sorted(step for *_, step in picture.rects("group")) == [1, 1, 2, 2]
    boxes = [e for e in picture.root.iter() if e.get("class") == "exposed"]
    spans = sorted((float(e.get("x")), float(e.get("x")) + float(e.get("width"))) for e in boxes)
    assert (pytest.approx(x_of(picture, 30), abs=0.5), pytest.approx(x_of(picture, 44), abs=0.5)) in spans
    assert {"forward", "backward", "optimizer", "other", "waiting", "transfer", "exposed"} <= picture.texts.keys()
    assert "ms since the first rank began" in picture.texts
    assert "rank 0: 42% of 24 ms communication overlapped, 14 ms exposed, 6 ms waiting" in picture.texts
    assert "rank 0: backward, 20 ms" in picture.titles()
    assert shown.captions[1] == (
        "1. all_reduce 4 kB (Cell In[3], line 4): rank 1 comes last, 6 ms after the first; then 14 ms of transfer. "
        "Rank 0 computes during 50% of it. Rank 1 computes during 71% of it."
    )
    assert "Rank 1 was late: the others waited 8 ms a step for it. It came last to 2 of 2." in shown.alt


def test_it_is_one_output_that_loads_nothing(two):
    shown = show.timeline(two)
    html = shown.html.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in html and "https:" not in html and "url(" not in html
    with Image.open(io.BytesIO(shown.still)) as image:
        assert image.width == 1350
        assert len(set(image.convert("L").tobytes())) > 5
    rows = {line.split("  ")[0]: line.split() for line in repr(shown).splitlines()}
    assert rows["exposed"] == ["exposed", "14.00", "9.00"]
    assert rows["overlapped, %"] == ["overlapped,", "%", "42", "53"]
    assert repr(show.overlap(two)) in repr(shown)


def test_many_ranks_one_rank_and_no_communication():
    group = tuple(range(12))
    calls = [message(r, k, k + 1, ranks=group) for r in group for k in range(0, 58, 2)]
    many = show.timeline(result([profile(r, [("forward", 0, 60)]) for r in group], calls))
    assert len(many.captions) == 30
    assert many.numbers.straggler is None
    assert len(many.html) < 900_000
    alone = show.timeline(result([profile(0, [("forward", 0, 60)])], []))
    assert "no communication" in alone.alt
    assert math.isnan(alone.numbers[0].share)
    assert "One rank waits for nobody." in repr(alone)
    empty = show.timeline(result([profile(r) for r in range(2)], []))
    assert [t.compute for t in empty.numbers] == [0, 0]


def test_more_than_can_be_stepped_through():
    calls = [message(r, k / 4, k / 4 + 0.1) for r in range(2) for k in range(240)]
    shown = show.timeline(result([profile(0), profile(1)], calls))
    assert len(shown.captions) == 201
    assert "240 collectives" in shown.captions[0]
    assert repr(shown).endswith("... and 200 more")


@pytest.mark.parametrize("bad", [None, [1], Result([1, 2], ["", ""], [], 0.1)])
def test_what_is_no_profiled_run_is_refused(bad):
    for picture in (show.timeline, show.overlap):
        with pytest.raises(TypeError, match=r"needs a profiled run: r = run\(show.profiled\(train_steps\), ranks=2\)"):
            picture(bad)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "all"])
def test_steps_that_make_no_sense(two, steps):
    with pytest.raises(ValueError, match="give steps=1 or more, or None for all"):
        show.timeline(two, steps=steps)


def train(wrap, average, slow=0.0):
    """Three steps of a net with gradients of 1.5 MB; rank 1 sleeps before each forward."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(128, 256)
    for _ in range(3):
        if dist.get_rank() == 1:
            time.sleep(slow)
        optimizer.zero_grad()
        model(data).pow(2).mean().backward()
        average(model)
        optimizer.step()


def naive(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def by_ring(model):
    ring = Communicator()
    for parameter in model.parameters():
        ring.all_reduce(parameter.grad, "mean")


def all_versions():
    def ddp(module):
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.3)

    def by_hand(module):
        return OverlappedDDP(module, bucket_mb=0.3)

    def on_a_thread(module):
        return OverlappedDDP(module, Communicator(), bucket_mb=0.3)

    versions = {
        "by hand": (by_hand, OverlappedDDP.synchronize),
        "thread": (on_a_thread, OverlappedDDP.synchronize),
        "ddp": (ddp, lambda model: None),
        "naive": (lambda module: module, naive),
        "ring": (lambda module: module, by_ring),
        "slow": (ddp, lambda model: None, 0.4),
    }
    return {name: show.profiled(train)(*options) for name, options in versions.items()}


@pytest.fixture(scope="module")
def real():
    """name -> the run, as if each had been one of its own."""
    r = run(all_versions, ranks=2, quiet=True)
    names = r.results[0]
    return {name: Result([each[name] for each in r.results], r.output, r.messages, r.seconds) for name in names}


def test_what_must_hold_in_every_run(real):
    for name, r in real.items():
        for steps in (1, 2, None):
            for t in show.overlap(r, steps):
                where = (name, steps, t)
                assert t.overlapped + t.exposed == pytest.approx(t.communication), where
                assert t.waiting + t.transfer == pytest.approx(t.communication), where
                assert sum(t.kinds.values()) == pytest.approx(t.compute), where
                assert 0 < t.compute <= t.step and 0 < t.communication <= t.step, where
                assert all(t.kinds[kind] > 0 for kind in ("forward", "backward", "optimizer")), where
    assert show.timeline(real["thread"], steps=None).still.startswith(b"\x89PNG")


def test_collectives_of_a_step(real):
    """As many as there are parameters, or buckets; the bytes are those of the gradients."""
    for name in ("naive", "ring"):
        assert show.overlap(real[name]).collectives == 12
    text = "".join(show.timeline(real["naive"]).captions)
    assert text.count("all_reduce 262 kB (test_timeline.py, line ") == 6
    found = re.findall(r"all_reduce (\d+) kB \(test_timeline.py", "".join(show.timeline(real["ddp"]).captions))
    assert 2 < len(found) < 12
    assert sum(map(int, found)) == pytest.approx(6 * 4 * (256 * 256 + 256) / 1000, abs=len(found))


def test_all_reduces_after_backward_overlap_with_nothing(real):
    for name in ("naive", "ring"):
        for t in show.overlap(real[name], steps=2):
            assert t.overlapped <= 0.02 * t.communication
            assert t.inside_backward <= 0.02 * t.communication


def test_by_hand_the_first_buckets_go_while_backward_runs(real):
    """Through torch, and through a Communicator on a thread of its own, of which torch's profiler knows nothing."""
    for name, where in (("by hand", r"\(link.py, line \d+\)"), ("thread", r"\(Communicator\)")):
        shown = show.timeline(real[name])
        sizes = [int(size) for size in re.findall(rf"all_reduce (\d+) kB {where}", "".join(shown.captions))]
        assert sum(sizes) == pytest.approx(6 * 4 * (256 * 256 + 256) / 1000, abs=len(sizes))
        assert 2 < len(sizes) < 12
        whole = show.overlap(real[name], steps=None)  # in one step a busy machine may let the thread begin too late
        assert sum(t.inside_backward for t in whole) > 0
        assert all(t.inside_backward < t.communication for t in whole)  # synchronize() waits for the last one


def test_inside_backward_is_a_myth(real):
    """DDP waits inside backward(): by that measure it always overlaps fully, though the last bucket never can.

    The third step: before the second forward DDP tells all ranks by two small broadcasts how it sorts its buckets.
    """
    for t in show.overlap(real["ddp"]):
        assert t.inside_backward > 0.95 * t.communication
        assert t.exposed > 0 and t.overlapped < t.inside_backward


def test_the_late_rank_is_named(real):
    """It spends less time in communication than the others, not more: the time before it counts."""
    found = show.overlap(real["slow"], steps=2)
    assert found.straggler == 1
    assert found[0].waiting > found[1].waiting
    assert found[0].communication > found[1].communication
    assert "Rank 1 was late" in repr(show.timeline(real["slow"], steps=2))
