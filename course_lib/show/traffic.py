"""The picture of a run's messages: bars for calls, arrows for transfers, bands for collectives."""

from course_lib.launch.result import Message
from course_lib.show import sentences
from course_lib.show.arrows import arrow
from course_lib.show.events import Collective, Event, Transfer
from course_lib.show.labels import key, labels
from course_lib.show.lanes import LEFT, RIGHT, WIDTH, Lanes, span
from course_lib.show.shapes import Canvas, Line, Rect, Shape, Text


def draw(found: list[Event], ranks: int, title: str) -> Canvas:
    """Lay out events; the k-th of them (from 1) is step k."""
    calls = [call for event in found for call in event.calls]
    begin, end = span([call.start for call in calls] + [call.end for call in calls if call.end is not None])
    if any(call.end is None for call in calls):
        end += 0.1 * (end - begin)  # room that shows: this goes on and on
    lanes = Lanes(ranks, begin, end)
    back: list[Shape] = [Text(LEFT, 22, title, "strong"), *lanes.frame(), *key(lanes, calls)]
    bars: list[Shape] = []
    arrows: list[Shape] = []
    for step, event in enumerate(found, 1):
        if isinstance(event, Transfer):
            bars += _transfer_bars(lanes, event, step)
            arrows += arrow(lanes, event, step)
        else:
            bars += _collective(lanes, event, step)
    texts = labels(lanes, found)
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


def _collective(lanes: Lanes, event: Collective, step: int) -> list[Shape]:
    members = [call.rank for call in event.calls] + list(event.missing)
    top, bottom = lanes.y(min(members)) - lanes.half, lanes.y(max(members)) + lanes.half
    stuck = bool(event.missing) or any(call.end is None for call in event.calls)
    x = lanes.x(event.ready)
    right = WIDTH - RIGHT if stuck else lanes.x(max(call.end for call in event.calls))
    shapes: list[Shape] = [Rect(x, top, max(right - x, 2.0), bottom - top, "band", step, sentences.caption(event))]
    for call in event.calls:
        ready = float("inf") if event.missing else event.ready
        shapes += _parts(lanes, call, ready, "group", step)
    for rank in event.missing:
        shapes.append(Line(x, lanes.y(rank), x, lanes.y(rank), "lost", step, sentences.caption(event), "cross"))
    return shapes
