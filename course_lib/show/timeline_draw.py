"""The drawing of a timeline: for each rank a row of computing, a row of communication, a strip of what is exposed."""

from dataclasses import dataclass

from course_lib.parallel.intervals import Interval
from course_lib.parallel.phases import KINDS
from course_lib.show import timeline_words, words
from course_lib.show.lanes import LEFT, TOP, WIDTH, Lanes
from course_lib.show.shapes import Canvas, Line, Rect, Shape, Text
from course_lib.show.timeline_lanes import Lane, Part, Story
from course_lib.show.timeline_numbers import Overlap

_KEY = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("optimizer", "optimizer"),
    ("other", "other"),
    ("edge", "in backward()"),
    ("wait", "waiting"),
    ("group", "transfer"),
    ("exposed", "exposed"),
]
_DEPTH = 3  # calls under way at the same time that get a bar of their own


@dataclass(frozen=True)
class _Scale(Lanes):
    """Rows of a rank, from the top of its lane."""

    axis_title: str = "ms since the first rank began"

    @property
    def pitch(self) -> float:
        return 106.0 if self.ranks <= 4 else 82.0

    @property
    def row(self) -> float:
        return 20.0 if self.ranks <= 4 else 13.0

    @property
    def eye(self) -> float:
        """Seconds that no eye can see: less than half a pixel."""
        return (self.end - self.begin) / 2000

    def top(self, place: int) -> float:
        return TOP + self.pitch * place + 30

    def talk(self, place: int) -> float:
        """Top of the communication row."""
        return self.top(place) + self.row + 6

    def strip(self, place: int) -> float:
        """Top of the strip of exposed communication."""
        return self.talk(place) + 1.5 * self.row + 4


def draw(told: Story, found: Overlap, most: int) -> Canvas:
    """Lay out the story; its k-th event is step k, up to `most`."""
    scale = _Scale(len(told.lanes), 0.0, max(lane.end for lane in told.lanes) * 1.005 or 1e-3)
    shapes: list[Shape] = [Text(LEFT, 22, timeline_words.title(told), "strong"), *scale.axis()]
    for place, lane in enumerate(told.lanes):
        shapes += _names(scale, place, timeline_words.head(found[place], found))
        shapes += _computing(scale, place, lane)
        shapes += _talking(scale, place, lane, most)
        for start, end in _joined(lane.exposed, scale.eye):
            shapes.append(_bar(scale, start, end, scale.strip(place), 5, "exposed"))
    alt = timeline_words.overview(told, found)
    return Canvas(WIDTH, scale.height, alt, [*shapes, *_key(scale, told)])


def _bar(scale: _Scale, start: float, end: float, y: float, height: float, look: str, *more) -> Rect:
    x = scale.x(start)
    return Rect(x, y, max(scale.x(end) - x, 0.7), height, look, *more)


def _names(scale: _Scale, place: int, head: str) -> list[Shape]:
    top, talk, strip = scale.top(place), scale.talk(place), scale.strip(place)
    rows = [("compute", top + scale.row - 5), ("comm.", talk + 0.75 * scale.row + 5), ("exposed", strip + 7)]
    if scale.ranks > 4:
        rows = rows[:2]
    named = [Text(LEFT - 8, y, name, "small", "end") for name, y in rows]
    return [Text(LEFT, top - 9, head, "text"), *named]


def _computing(scale: _Scale, place: int, lane: Lane) -> list[Shape]:
    top, shapes = scale.top(place), []
    for start, end in lane.backwards:
        shapes.append(Line(scale.x(start), top - 3, scale.x(end), top - 3, "edge"))
    for kind in KINDS:
        for start, end in _joined(lane.compute[kind], scale.eye):
            title = f"rank {lane.rank}: {kind}, {words.duration(end - start)}"
            shapes.append(_bar(scale, start, end, top, scale.row, kind, None, title))
    return shapes


def _joined(pieces: list[Interval], gap: float) -> list[Interval]:
    """Pieces that no eye can tell apart are drawn as one."""
    found: list[Interval] = []
    for start, end in pieces:
        if found and start - found[-1][1] < gap:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _talking(scale: _Scale, place: int, lane: Lane, most: int) -> list[Shape]:
    """Calls that are under way together lie one below the other."""
    shapes: list[Shape] = []
    depths = _depths(lane.parts)
    deep = max(depths, default=0) + 1
    height = 1.5 * scale.row / deep
    for part, depth in zip(lane.parts, depths, strict=True):
        y, step = scale.talk(place) + depth * height, part.number if part.number <= most else None
        title = timeline_words.name(part.event)
        if part.ready > part.start:
            shapes.append(_bar(scale, part.start, part.ready, y, height - 1, "wait", step, f"{title}: waiting"))
        if part.end > part.ready:
            shapes.append(_bar(scale, part.ready, part.end, y, height - 1, "group", step, f"{title}: transfer"))
        if step is not None and height > 9 and scale.x(part.end) - scale.x(part.start) > 9 * len(str(part.number)):
            middle = (scale.x(part.start) + scale.x(part.end)) / 2
            shapes.append(Text(middle, y + height / 2 + 4, str(part.number), "label", "middle", step))
    return shapes


def _depths(parts: list[Part]) -> list[int]:
    """In which line each bar goes: the first that is free, or the last."""
    free = [float("-inf")] * _DEPTH
    found = []
    for part in parts:
        depth = next((k for k, until in enumerate(free) if until <= part.start), _DEPTH - 1)
        free[depth] = max(free[depth], part.end)
        found.append(depth)
    return found


def _key(scale: _Scale, told: Story) -> list[Shape]:
    """The legend: what occurs in this picture, no more."""
    there = {kind for lane in told.lanes for kind in KINDS if lane.compute[kind]}
    there |= {"edge"} if any(lane.backwards for lane in told.lanes) else set()
    parts = [part for lane in told.lanes for part in lane.parts]
    there |= {"wait"} if any(part.ready > part.start for part in parts) else set()
    there |= {"group"} if any(part.end > part.ready for part in parts) else set()
    there |= {"exposed"} if any(lane.exposed for lane in told.lanes) else set()
    shapes: list[Shape] = []
    x, y = LEFT, scale.bottom + 60
    for look, text in _KEY:
        if look in there:
            line = Line(x, y - 4, x + 16, y - 4, look) if look == "edge" else Rect(x, y - 10, 16, 11, look)
            shapes += [line, Text(x + 21, y, text, "small")]
            x += 21 + 7.2 * len(text) + 18
    return shapes
