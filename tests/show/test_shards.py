"""show.shards: a box for each sample where it belongs, and words for what is repeated or missing."""

import pytest
import torch

from course_lib import show


def boxes(drawn, picture, look):
    """(row, number) of the boxes with this look, by the places of the texts in them."""
    canvas = drawn(picture.frames[0])
    found = []
    for box in canvas.root.iter("{http://www.w3.org/2000/svg}rect"):
        if box.get("class") == look:
            x, y, wide, high = (float(box.get(k)) for k in ("x", "y", "width", "height"))
            (text,) = (t for t in canvas.root.iter("{http://www.w3.org/2000/svg}text")
                       if x < float(t.get("x")) < x + wide and y < float(t.get("y")) < y + high)  # fmt: skip
            rank = min((abs(at - y - 18), name) for name, (_, at) in canvas.texts.items() if name.startswith("rank"))
            found.append((rank[1], int(text.text)))
    return found


def test_repeated_and_missing_samples(drawn):
    picture = show.shards([[0, 3, 5], [1, 4, 0], [2]], 7)
    assert boxes(drawn, picture, "again") == [("rank 0", 0), ("rank 1", 0)]
    assert sorted(boxes(drawn, picture, "done")) == [
        ("rank 0", 3), ("rank 0", 5), ("rank 1", 1), ("rank 1", 4), ("rank 2", 2),
    ]  # fmt: skip
    assert repr(picture).splitlines() == [
        "7 samples on 3 ranks: 1 seen more than once (0), 1 never seen (6).",
        "rank 0: 0 3 5",
        "rank 1: 1 4 0",
        "rank 2: 2",
    ]


def test_batches_tensors_and_empty_shares(drawn):
    picture = show.shards([[torch.tensor([0, 2]), torch.tensor([4])], [[1, 3]], []], 5)
    assert repr(picture).splitlines() == [
        "5 samples on 3 ranks: each is seen once.", "rank 0: 0 2 | 4", "rank 1: 1 3", "rank 2: ",
    ]  # fmt: skip
    assert boxes(drawn, picture, "again") == []
    two, four = (float(drawn(picture.frames[0]).texts[text][0]) for text in ("2", "4"))
    zero = float(drawn(picture.frames[0]).texts["0"][0])
    assert four - two > two - zero  # a gap between batches


def test_many_samples_are_counted_not_drawn(drawn):
    picture = show.shards([range(100), range(100)], 100)
    assert "100 seen more than once (0, 1, 2, 3, 4, 5, 6, 7, ...)" in repr(picture)
    assert len(boxes(drawn, picture, "again")) == 60
    assert "and 70 more" in drawn(picture.frames[0]).texts


@pytest.mark.parametrize(
    ("shares", "samples", "error", "says"),
    [
        ([[0, 5]], 5, ValueError, "5 samples, 0 to 4, and one is 5"),
        ([3, 4], 5, TypeError, "a list for each rank"),
        (7, 5, TypeError, "a list for each rank"),
    ],
)
def test_bad_input(shares, samples, error, says):
    with pytest.raises(error, match=says):
        show.shards(shares, samples)
