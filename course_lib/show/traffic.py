"""The picture of a run's messages: bars for calls, arrows for transfers, bands for collectives."""

from course_lib.launch.result import Message
from course_lib.show import sentences, words
from course_lib.show.events import Collective, Event, Transfer
from course_lib.show.lanes import LEFT, RIGHT, WIDTH, Lanes, span
from course_lib.show.shapes import Canvas, Line, Rect, Shape, Text

_KEY = [
    ("send", "sends"),
    ("recv", "receives"),
    ("group", "collective"),
    ("wait", "waits for another rank"),
    ("open-send", "isend until wait() returns"),
    ("open-recv", "irecv until wait() returns"),
]
_LABELS = 60  # more messages than this: no label but that of the current step


def draw(found: list[Event], ranks: int, title: str) -> Canvas:
    """Lay out events; the k-th of them (from 1) is step k."""
    calls = [call for event in found for call in event.calls]
    begin, end = span([call.start for call in calls] + [call.end for call in calls if call.end is not None])
    if any(call.end is None for call in calls):
        end += 0.1 * (end - begin)  # room that shows: this goes on and on
    lanes = Lanes(ranks, begin, end)
    back: list[Shape] = [Text(LEFT, 22, title, "strong"), *lanes.frame(), *_key(lanes, calls)]
    bars: list[Shape] = []
    arrows: list[Shape] = []
    for step, event in enumerate(found, 1):
        if isinstance(event, Transfer):
            bars += _transfer_bars(lanes, event, step)
            arrows += _arrow(lanes, event, step)
        else:
            bars += _collective(lanes, event, step)
    texts = _labels(lanes, found)
    return Canvas(WIDTH, lanes.height, title, [*back, *bars, *arrows, *texts])


def _bar(lanes: Lanes, call: Message, start: float, end: float | None, look: str, step: int) -> Rect:
    x = lanes.x(start)
    right = WIDTH - RIGHT if end is None else lanes.x(end)
    y, height = lanes.y(call.rank), lanes.half
    if call.op in ("send", "isend"):
        y -= height
    elif call.op not in ("recv", "irecv"):
        y, height = y - height, 2 * height
    return Rect(x, y, max(right - x, 1.0), height, look, step, sentences.hover(call))


def _parts(lanes: Lanes, call: Message, ready: float, look: str, step: int) -> list[Shape]:
    """A call that blocks: waiting until the other side is ready too, then working."""
    if call.end is None:
        return [_bar(lanes, call, call.start, None, "wait", step)]
    ready = min(max(ready, call.start), call.end)
    waiting = [_bar(lanes, call, call.start, ready, "wait", step)] if ready > call.start else []
    return [*waiting, _bar(lanes, call, ready, call.end, look, step)]


def _transfer_bars(lanes: Lanes, event: Transfer, step: int) -> list[Shape]:
    shapes: list[Shape] = []
    ready = max(call.start for call in event.calls)
    for call in event.calls:
        kind = "send" if call is event.send else "recv"
        if call.op.startswith("i"):
            shapes.append(_bar(lanes, call, call.start, call.end, f"open-{kind}", step))
        elif event.send is None or event.recv is None:
            shapes.append(_bar(lanes, call, call.start, call.end, "wait", step))
        else:
            shapes += _parts(lanes, call, ready, kind, step)
    return shapes


def _arrow(lanes: Lanes, event: Transfer, step: int) -> list[Shape]:
    """From the sender's start to the receiver's end; a message that found no taker stops on its way."""
    title = sentences.caption(event)
    if event.send is None:
        end = WIDTH - RIGHT if event.recv.end is None else lanes.x(event.recv.end)
        y = lanes.y(event.dst) + lanes.half / 2
        return [Line(end, y, end, y, "lost", step, title, "cross")]
    x, y = lanes.x(event.send.start), lanes.y(event.src)
    to = lanes.y(event.dst)
    if event.recv is not None and event.recv.end is not None:
        return [Line(x, y, lanes.x(event.recv.end), to, "arrow", step, title, "arrow")]
    return [Line(x, y, min(x + 24, WIDTH - RIGHT), y + 0.5 * (to - y), "lost", step, title, "cross")]


def _collective(lanes: Lanes, event: Collective, step: int) -> list[Shape]:
    members = [call.rank for call in event.calls] + list(event.missing)
    top, bottom = lanes.y(min(members)) - lanes.half, lanes.y(max(members)) + lanes.half
    stuck = bool(event.missing) or any(call.end is None for call in event.calls)
    x = lanes.x(event.ready)
    right = WIDTH - RIGHT if stuck else lanes.x(max(call.end for call in event.calls))
    shapes: list[Shape] = [
        Rect(x, top, max(right - x, 2.0), bottom - top, "band", step, sentences.caption(event))
    ]
    for call in event.calls:
        ready = float("inf") if event.missing else event.ready
        shapes += _parts(lanes, call, ready, "group", step)
    for rank in event.missing:
        shapes.append(
            Line(x, lanes.y(rank), x, lanes.y(rank), "lost", step, sentences.caption(event), "cross")
        )
    return shapes


def _labels(lanes: Lanes, found: list[Event]) -> list[Shape]:
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
    line = _arrow(lanes, event, 0)[0]
    if line.head == "cross":
        return line.x2 + 12, line.y2 + 5
    x, y = (line.x1 + line.x2) / 2, (line.y1 + line.y2) / 2
    flat = abs(line.x2 - line.x1) / max(abs(line.y2 - line.y1), 1.0)
    if flat > 3:  # nearly level: above it
        return x - 20, y - 6 - 24 / flat
    down = line.y2 > line.y1
    return x + 6 + 7 * flat, y + (2 if down else 8)


def _over_band(lanes: Lanes, event: Collective) -> tuple[float, float]:
    return lanes.x(event.ready), lanes.y(min(call.rank for call in event.calls)) - lanes.half - 5


def _key(lanes: Lanes, calls: list[Message]) -> list[Shape]:
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
