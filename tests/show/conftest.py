"""Runs that are made by hand, so that every arrow of their picture is known."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from course_lib.launch.result import Message, Result


def _message(rank, op, peer, nbytes, start_ms, end_ms, where="Cell In[3], line 4", **rest):
    end = None if end_ms is None else end_ms / 1000
    return Message(rank, op, peer, nbytes, start_ms / 1000, end, where, **rest)


def _result(ranks, messages, seconds=0.01):
    return Result([None] * ranks, [""] * ranks, list(messages), seconds)


@pytest.fixture
def made():
    """made.message(rank, op, peer, nbytes, start_ms, end_ms) and made.result(ranks, messages)."""
    return SimpleNamespace(message=_message, result=_result)


@pytest.fixture
def ring(made):
    """Three ranks, each sends 4,096 B to the next at 1 + rank ms; it arrives 2 ms later."""
    calls = []
    for rank in range(3):
        calls.append(made.message(rank, "isend", (rank + 1) % 3, 4096, 1 + rank, 2.5 + rank))
        calls.append(made.message((rank + 1) % 3, "recv", rank, 4096, 0.5, 3 + rank, "Cell In[3], line 5"))
    return made.result(3, calls)


@pytest.fixture
def drawn():
    """Read an SVG text as a browser would: its elements, arrows and texts."""
    return _Drawn


class _Drawn:
    def __init__(self, svg):
        self.root = ElementTree.fromstring(svg)
        self.texts = {e.text: (float(e.get("x")), float(e.get("y"))) for e in self._all("text")}

    def _all(self, tag):
        return self.root.iter("{http://www.w3.org/2000/svg}" + tag)

    def arrows(self, kind="arrow"):
        """step -> (x1, y1, x2, y2) of each arrow ("cross": of each message that got lost)."""
        found = {}
        for group in self._all("g"):
            if group.get("class") == kind:
                path = group.find("{http://www.w3.org/2000/svg}path").get("d")
                found[int(group.get("data-step"))] = tuple(map(float, re.findall(r"[\d.]+", path)))
        return found

    def rects(self, look):
        """(x, y, width, height, step) of each rectangle with this look; those of the legend have no step."""
        boxes = [e for e in self._all("rect") if e.get("class") == look and e.get("data-step")]
        return [(*(float(e.get(k)) for k in ("x", "y", "width", "height")), int(e.get("data-step"))) for e in boxes]

    def titles(self):
        return [e.text for e in self._all("title")]

    def x_of(self, ms):
        """Pixels of a moment, by the labels of the time axis: not by the code that placed the arrows."""
        marks = sorted((float(text), x) for text, (x, _) in self.texts.items() if re.fullmatch(r"[\d.]+", text))
        (low, a), (high, b) = marks[0], marks[-1]
        return a + (ms - low) / (high - low) * (b - a)

    def y_of(self, rank):
        """Pixels of a lane: its name stands five pixels below the line."""
        return self.texts[f"rank {rank}"][1] - 5
