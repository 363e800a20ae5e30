"""show.spans: what it draws and what it refuses."""

import pytest

from course_lib import show


def test_a_picture_with_the_unions_in_words():
    trace = [(4, "forward", 1000, 3000), (4, "forward", 2000, 4000), (5, "data", 1000, 1500)]
    picture = show.spans([*trace, (5, "communication", 2000, 2500)])
    assert picture.png.startswith(b"\x89PNG")
    assert picture.text == "rank 4: forward 3.0 ms\nrank 5: data 0.5 ms, communication 0.5 ms"


@pytest.mark.parametrize("trace", [[], [(0, "gpu", 0, 1)]])
def test_nothing_and_other_kinds_are_refused(trace):
    with pytest.raises(ValueError, match="at least one span, of the kinds forward, backward"):
        show.spans(trace)
