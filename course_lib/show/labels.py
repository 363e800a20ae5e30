"""The texts in the picture of messages: how many bytes beside each arrow, and the legend."""

from course_lib.launch.result import Message
from course_lib.show import words
from course_lib.show.arrows import arrow
from course_lib.show.events import Collective, Event, Transfer
from course_lib.show.lanes import LEFT, WIDTH, Lanes
from course_lib.show.shapes import Rect, Shape, Text

_KEY = [
    ("send", "sends"),
    ("recv", "receives"),
    ("group", "collective"),
    ("wait", "waits for another rank"),
    ("open-send", "isend until wait() returns"),
    ("open-recv", "irecv until wait() returns"),
]
_LABELS = 60  # more messages than this: no label but that of the current step


def labels(lanes: Lanes, found: list[Event]) -> list[Shape]:
    """How many bytes, beside each arrow or over each band; where there is no room, at its own step only."""
    taken: list[tuple[float, float, float, float]] = []
    shapes: list[Shape] = []
    for step, event in enumerate(found, 1):
        if isinstance(event, Transfer) and event.send is None:
            continue
        text = _amount(event)
        width = 7.6 * len(text)
        x, y = _beside_arrow(lanes, event) if isinstance(event, Transfer) else _over_band(lanes, event)
        x = min(x, WIDTH - width)
        box = (x, y - 13, x + width, y + 3)
        crowded = any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)
        crowded = crowded or len(found) > _LABELS
        if not crowded:
            taken.append(box)
        shapes.append(Text(x, y, text, "label", step=step, only_now=crowded))
    return shapes


def _amount(event: Event) -> str:
    nbytes = max(call.nbytes for call in event.calls)
    if isinstance(event, Transfer):
        return words.size(nbytes)
    return "/".join(event.names) + (f" {words.size(nbytes)}" if nbytes else "")


def _beside_arrow(lanes: Lanes, event: Transfer) -> tuple[float, float]:
    """Left end of the text's baseline, clear of the arrow."""
    line = arrow(lanes, event, 0)[0]
    if line.head == "cross":
        return line.x2 + 12, line.y2 + 5
    part = 0.5 / max(abs(event.dst - event.src), 1)  # half-way to the next lane, where no bars are
    x, y = line.x1 + part * (line.x2 - line.x1), line.y1 + part * (line.y2 - line.y1)
    flat = abs(line.x2 - line.x1) / max(abs(line.y2 - line.y1), 1.0)
    if flat > 3:  # nearly level: above it
        return x - 20, y - 6 - 24 / flat
    down = line.y2 > line.y1
    return x + 6 + 7 * flat, y + (2 if down else 8)


def _over_band(lanes: Lanes, event: Collective) -> tuple[float, float]:
    return lanes.x(event.ready), lanes.y(min(call.rank for call in event.calls)) - lanes.half - 5


def key(lanes: Lanes, calls: list[Message]) -> list[Shape]:
    """The legend: what occurs in this picture, no more."""
    ops = {call.op for call in calls}
    group = bool(ops - {"send", "isend", "recv", "irecv"})
    wanted = {
        "send": "send" in ops,
        "recv": "recv" in ops,
        "group": group,
        "wait": group or bool(ops & {"send", "recv"}),
        "open-send": "isend" in ops,
        "open-recv": "irecv" in ops,
    }
    shapes: list[Shape] = []
    x, y = LEFT, lanes.bottom + 60
    for look, text in _KEY:
        if wanted[look]:
            shapes.append(Rect(x, y - 10, 18, 11, look))
            shapes.append(Text(x + 25, y, text, "small"))
            x += 25 + 6.6 * len(text) + 18
    return shapes
