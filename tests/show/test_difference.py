"""show.difference: how far several ranks are from one process."""

import pytest
import torch
from matplotlib.figure import Figure

from course_lib import show

ONE = torch.tensor([[1.0, -4.0], [2.0, 8.0]], dtype=torch.float64)  # two steps, two weights


def test_draws_the_rank_that_is_furthest_relative_to_the_largest_weight(monkeypatch):
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: saved.append(self) or save(self, *a, **k))
    off = ONE + torch.tensor([[0.0, 0.004], [0.08, 0.0]])
    picture = show.difference(ONE, {"right": [ONE, ONE], "off": [ONE, off]})
    lines = {line.get_label(): line.get_ydata() for line in saved[0].axes[0].lines}
    assert lines["off"] == pytest.approx([0.001, 0.01])
    assert list(lines["right"]) == [1e-17, 1e-17] and saved[0].axes[0].get_yscale() == "log"
    assert "off" in picture.text and "first 1.0e-03   last 1.0e-02" in picture.text
    assert picture.png.startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [[], [ONE[0]], [ONE, ONE[:1]]])
def test_refuses_what_cannot_be_compared(ranks):
    with pytest.raises(ValueError, match=r"mine: give a tensor \(steps, weights\) for each rank"):
        show.difference(ONE, {"mine": ranks})
