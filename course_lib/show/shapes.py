"""The few shapes that pictures are made of, in pixels of a fixed canvas; `svg` and `still` both draw them.

`look` names a style (see `looks`), `step` the step that a shape belongs to (None: always plain).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    look: str
    step: int | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    look: str
    step: int | None = None
    title: str = ""
    head: str = ""  # "arrow", "cross" or none, at (x2, y2)


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  # the baseline
    text: str
    look: str = "text"
    anchor: str = "start"
    step: int | None = None
    only_now: bool = False  # no room: shown while its step is the current one


Shape = Rect | Line | Text


@dataclass(frozen=True)
class Canvas:
    """A finished drawing. `alt` says in a sentence what there is to see."""

    width: float
    height: float
    alt: str
    shapes: list[Shape] = field(default_factory=list)
