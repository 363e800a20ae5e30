"""show.messages: the right arrows, bars and words for runs that are known exactly."""

import base64
import io
import json
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from course_lib import show
from course_lib.launch import RunError


def test_arrows_of_a_ring(ring, drawn):
    picture = drawn(show.messages(ring).frames[0])
    arrows = picture.arrows()
    assert sorted(arrows) == [1, 2, 3]  # in the order of time
    for step, ends in arrows.items():
        rank = step - 1
        right = (
            picture.x_of(1 + rank),
            picture.y_of(rank),
            picture.x_of(3 + rank),
            picture.y_of((rank + 1) % 3),
        )
        assert ends == pytest.approx(right, abs=0.3)


def test_bytes_words_and_sources(ring, drawn):
    stepper = show.messages(ring)
    assert stepper.captions[1] == (
        "rank 0 sends 4.1 kB to rank 1 (Cell In[3], line 4): 2 ms; rank 1 had waited 0.5 ms for it (Cell In[3], line 5)"
    )
    picture = drawn(stepper.frames[0])
    assert "4.1 kB" in picture.texts
    assert "rank 0: isend to rank 1, 4,096 B\nCell In[3], line 4\n1.000 to 2.500 ms" in picture.titles()
    assert stepper.captions[0].startswith("Who sent what to whom: 3 ranks, 3 messages; 12.3 kB sent")
    row = " ".join(repr(stepper).splitlines()[2].split())
    assert row == "1.000 0 1 send 4,096 2 ms Cell In[3], line 4"


def test_waiting_for_the_sender_and_for_the_receiver(made, drawn):
    calls = [
        made.message(0, "send", 1, 8, 4, 6), made.message(1, "recv", 0, 8, 1, 6),
        made.message(1, "send", 0, 8, 7, 10), made.message(0, "recv", 1, 8, 9, 10),
    ]  # fmt: skip
    stepper = show.messages(made.result(2, calls))
    picture = drawn(stepper.frames[0])
    waits = {step: (x, x + width) for x, _, width, _, step in picture.rects("wait")}
    assert waits[1] == pytest.approx((picture.x_of(1), picture.x_of(4)), abs=0.3)
    assert waits[2] == pytest.approx((picture.x_of(7), picture.x_of(9)), abs=0.3)
    assert "rank 1 had waited 3 ms for it" in stepper.captions[1]
    assert "of which 2 ms until rank 0 was ready" in stepper.captions[2]


def test_equal_pairs_are_matched_in_order_and_tags_apart(made, drawn):
    calls = [
        made.message(0, "send", 1, 10, 1, 2), made.message(0, "send", 1, 20, 3, 4),
        made.message(0, "isend", 1, 30, 5, 9, tag=7),
        made.message(1, "irecv", 0, 30, 0, 9, tag=7),
        made.message(1, "recv", 0, 10, 1, 2), made.message(1, "recv", 0, 20, 3, 4),
    ]  # fmt: skip
    stepper = show.messages(made.result(2, calls))
    ends = {step: ends[2] for step, ends in drawn(stepper.frames[0]).arrows().items()}
    picture = drawn(stepper.frames[0])
    assert [ends[k] for k in (1, 2, 3)] == pytest.approx([picture.x_of(ms) for ms in (2, 4, 9)], abs=0.3)
    assert "sends 30 B to rank 1 with tag 7" in stepper.captions[3]


def test_receive_from_any_rank_takes_what_is_left(made, drawn):
    calls = [
        made.message(0, "send", 2, 8, 1, 2), made.message(1, "send", 2, 8, 3, 4),
        made.message(2, "recv", None, 8, 0, 2), made.message(2, "recv", 1, 8, 2, 4),
    ]  # fmt: skip
    arrows = drawn(show.messages(made.result(3, calls)).frames[0]).arrows()
    assert len(arrows) == 2


def test_unmatched_and_unfinished(made, drawn):
    calls = [
        made.message(0, "send", 1, 400, 1, None),
        made.message(1, "recv", 0, 400, 2, None, tag=3),
        made.message(1, "irecv", None, 4, 3, 4, tag=9),
    ]
    stepper = show.messages(made.result(2, calls))
    picture = drawn(stepper.frames[0])
    assert picture.arrows() == {}
    assert sorted(picture.arrows("cross")) == [1, 2, 3]
    assert stepper.captions[1].endswith("rank 1 never received it and the call never finished")
    assert "from rank 0 with tag 3 (Cell In[3], line 4): nobody sent it" in stepper.captions[2]
    assert "from any rank" in stepper.captions[3]
    assert "1 message found no receiver. 2 receives found no message." in stepper.captions[0]
    assert "not received" in repr(stepper)


def test_a_deadlock_that_run_reported_can_be_drawn(made):
    calls = [made.message(0, "send", 1, 4, 1, None), made.message(1, "send", 0, 4, 1, None)]
    stepper = show.messages(RunError("rank 0 waits", messages=calls, output=["", "", ""]))
    assert stepper.captions[0].startswith("Who sent what to whom: 3 ranks, 2 messages")


def test_collectives_cover_their_group_and_show_who_waited(made, drawn):
    group = (0, 2)
    calls = [
        made.message(0, "all_reduce", None, 1_500_000, 1, 6, ranks=group),
        made.message(2, "all_reduce", None, 1_500_000, 4, 6.5, ranks=group),
        made.message(1, "barrier", None, 0, 1, 2, ranks=(1,)),
    ]
    stepper = show.messages(made.result(3, calls))
    picture = drawn(stepper.frames[0])
    ((x, y, width, height, _),) = [box for box in picture.rects("band") if box[3] > 50]
    assert (x, x + width) == pytest.approx((picture.x_of(4), picture.x_of(6.5)), abs=0.3)
    assert y < picture.y_of(0) and y + height > picture.y_of(2)
    ((wait_x, _, wait_width, _, _),) = picture.rects("wait")
    assert (wait_x, wait_x + wait_width) == pytest.approx((picture.x_of(1), picture.x_of(4)), abs=0.3)
    assert "all_reduce 1.5 MB" in picture.texts
    assert "all_reduce of 1.5 MB on ranks 0 and 2" in "".join(stepper.captions)
    assert "rank 0 came first, rank 2 last, 3 ms later" in "".join(stepper.captions)


def test_collectives_that_do_not_agree_or_lack_a_rank(made):
    world = (0, 1, 2)
    calls = [made.message(rank, "all_reduce", None, 4, 1, 2, ranks=world) for rank in world]
    calls += [made.message(0, "barrier", None, 0, 3, None, ranks=world)]
    calls += [made.message(1, "broadcast", 0, 4, 3.5, None, ranks=world)]
    stepper = show.messages(made.result(3, calls))
    assert stepper.captions[2] == (
        "the ranks do not agree: rank 0 calls barrier (Cell In[3], line 4); rank 1 calls broadcast (Cell In[3], line 4)"
    )
    calls[-1] = made.message(1, "barrier", None, 0, 3.5, None, ranks=world)
    stepper = show.messages(made.result(3, calls))
    assert stepper.captions[2].endswith("rank 2 never called it")
    assert "1 collective not called by every rank" in stepper.captions[0]


def test_nothing_sent(made):
    stepper = show.messages(made.result(2, []))
    assert len(stepper.captions) == 1
    assert "They sent nothing to each other." in stepper.captions[0]
    assert " hidden>" in json.loads(f'"{re.search(r"controls.: .(.*?)..caption", stepper.html)[1]}"')


def test_ten_thousand_messages_stay_light(made):
    calls = []
    for k in range(10_000):
        calls.append(made.message(k % 4, "send", (k + 1) % 4, 8, k, k + 0.5))
        calls.append(made.message((k + 1) % 4, "recv", k % 4, 8, k, k + 0.5))
    stepper = show.messages(made.result(4, calls))
    assert len(stepper.captions) == 201
    assert "10,000 messages" in stepper.captions[0]
    assert "Only the first 200 are drawn." in stepper.captions[0]
    assert len(stepper.html) < 600_000
    assert repr(stepper).endswith("... and 9,960 more")
    assert len(show.messages(made.result(4, calls), most=7).captions) == 8


def test_names_of_files_are_escaped(made):
    evil = '</script><img src=x onerror="alert(1)">&.py, line 1'
    calls = [made.message(0, "send", 1, 4, 1, 2, evil), made.message(1, "recv", 0, 4, 1, 2, evil)]
    stepper = show.messages(made.result(2, calls))
    assert stepper.html.count("</script>") == 1
    assert "<img src=x" not in stepper.html
    titles = [e.text for e in ElementTree.fromstring(stepper.frames[0]).iter() if e.tag.endswith("title")]
    assert any(evil in title for title in titles)


def test_html_is_self_contained_and_starts_from_a_png(ring):
    bundle = show.messages(ring)._repr_mimebundle_()
    html = bundle["text/html"].replace("http://www.w3.org/2000/svg", "")  # a name, not an address to load
    assert "http:" not in html and "https:" not in html and "url(" not in html and "@import" not in html
    outside = re.sub(r"<script>.*</script>", "", html, flags=re.S)
    assert "<svg" not in outside and "<style" not in outside  # what an untrusted notebook keeps is the image
    source = re.search(r'<img alt="Who sent[^"]*" src="data:image/png;base64,([^"]+)"', outside)[1]
    with Image.open(io.BytesIO(base64.b64decode(source))) as image:
        image.load()
        assert image.width == 1350
        assert len(set(image.convert("L").tobytes())) > 5  # not an empty sheet
    assert source == bundle["image/png"]


def test_bad_arguments_are_sentences(ring):
    with pytest.raises(TypeError, match=r"draws what run\(\.\.\.\) returned, not list"):
        show.messages([1, 2])
    with pytest.raises(ValueError, match="most=1 or more"):
        show.messages(ring, most=0)
