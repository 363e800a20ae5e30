"""The arrow of a transfer."""

from course_lib.show import sentences
from course_lib.show.events import Transfer
from course_lib.show.lanes import RIGHT, WIDTH, Lanes
from course_lib.show.shapes import Line


def arrow(lanes: Lanes, event: Transfer, step: int) -> list[Line]:
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
