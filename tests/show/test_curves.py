"""show.curves: what it draws and what it refuses."""

import pytest

from course_lib import show


def test_a_picture_with_the_numbers_in_words():
    picture = show.curves({"exact": [2.0, 1.0], "one bit": [2.0, 1.25]}, "step", "loss", log=True)
    assert picture.png.startswith(b"\x89PNG")
    assert "exact: 2 to 1; one bit: 2 to 1.25" in picture.alt and "loss against step" in picture.alt


@pytest.mark.parametrize("lines", [{}, {"empty": []}, {str(k): [1.0] for k in range(6)}])
def test_too_few_or_too_many_lines(lines):
    with pytest.raises(ValueError, match="1 to 5 lines with at least one value each"):
        show.curves(lines, "step", "loss")
