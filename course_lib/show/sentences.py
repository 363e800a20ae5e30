"""What happened, in words: the caption of a step and the rows of the table."""

from course_lib.launch.result import Message
from course_lib.show import words
from course_lib.show.events import Collective, Event, Transfer


def caption(event: Event) -> str:
    """One sentence about an event, for the line below the picture."""
    return _transfer(event) if isinstance(event, Transfer) else _collective(event)


def hover(call: Message) -> str:
    """The text that a call's bar shows under the mouse: operation, bytes, source line, times."""
    other = "" if call.peer is None else f" {_direction(call)} rank {call.peer}"
    end = "never finished" if call.end is None else f"to {call.end * 1000:,.3f} ms"
    return f"rank {call.rank}: {call.op}{other}, {call.nbytes:,} B\n{call.where}\n{call.start * 1000:,.3f} {end}"


def _direction(call: Message) -> str:
    return "to" if call.op in ("send", "isend", "gather", "reduce") else "from"


def _transfer(event: Transfer) -> str:
    send, recv = event.send, event.recv
    if send is None:
        whom = "any rank" if event.src is None else f"rank {event.src}"
        return (
            f"rank {event.dst} receives {words.size(recv.nbytes)} from {whom}{_tag(recv)} ({recv.where}): "
            f"nobody sent it{_unfinished(recv)}"
        )
    text = f"rank {event.src} sends {words.size(send.nbytes)} to rank {event.dst}{_tag(send)} ({send.where})"
    if recv is None:
        return f"{text}: rank {event.dst} never received it{_unfinished(send)}"
    if recv.end is None:
        return f"{text}: the receive at {recv.where} never finished"
    text += f": {words.duration(recv.end - send.start)}"
    if recv.op == "recv" and recv.start < send.start:
        text += f"; rank {event.dst} had waited {words.duration(send.start - recv.start)} for it ({recv.where})"
    elif send.op == "send" and send.start < recv.start:
        text += f", of which {words.duration(recv.start - send.start)} until rank {event.dst} was ready"
    return text + (f"; {_unequal(send, recv)}" if recv.nbytes != send.nbytes else "")


def _tag(call: Message) -> str:
    return f" with tag {call.tag}" if call.tag else ""


def _unequal(send: Message, recv: Message) -> str:
    return f"sent {send.nbytes:,} B into a buffer of {recv.nbytes:,} B"


def _unfinished(call: Message) -> str:
    return " and the call never finished" if call.end is None else ""


def _collective(event: Collective) -> str:
    first = min(event.calls, key=lambda call: call.start)
    last = max(event.calls, key=lambda call: call.start)
    who = words.ranks(call.rank for call in event.calls)
    if len(event.names) > 1:
        each = "; ".join(f"rank {call.rank} calls {call.op} ({call.where})" for call in event.calls)
        return f"the ranks do not agree: {each}"
    largest = max(call.nbytes for call in event.calls)
    amount = f" of {words.size(largest)}" if largest else ""
    root = "" if first.peer is None else f" {_direction(first)} rank {first.peer}"
    text = f"{first.op}{amount}{root} on {who} ({first.where})"
    if event.missing:
        return f"{text}: {words.ranks(event.missing)} never called it"
    if any(call.end is None for call in event.calls):
        stuck = words.ranks(call.rank for call in event.calls if call.end is None)
        return f"{text}: never finished on {stuck}"
    text += f": {words.duration(max(call.end for call in event.calls) - first.start)}"
    if last.start > first.start:
        waited = words.duration(last.start - first.start)
        text += f"; rank {first.rank} came first, rank {last.rank} last, {waited} later"
    return text


def table(found: list[Event], most: int) -> str:
    """A plain-text table of the first `most` events: when, from, to, operation, bytes, time, source."""
    rows = [("ms", "from", "to", "what", "bytes", "took", "where")]
    rows += [_row(event) for event in found[:most]]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    align = [str.rjust if k in (0, 4) else str.ljust for k in range(len(widths))]  # numbers to the right
    lines = ["  ".join(put(cell, w) for put, cell, w in zip(align, row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _row(event: Event) -> tuple[str, ...]:
    call = event.calls[0]
    if isinstance(event, Transfer):
        ends = [event.recv.end if event.recv else None]
        source, target = "?" if event.src is None else str(event.src), str(event.dst)
        what = "recv" if event.send is None else "send"
        took = "nobody sent" if event.send is None else "not received" if event.recv is None else ""
    else:
        ends = [call.end for call in event.calls]
        everyone = ",".join(str(call.rank) for call in event.calls)
        source = target = everyone
        what = "/".join(event.names)
        took = "not by " + ",".join(map(str, event.missing)) if event.missing else ""
    if not took:
        took = "unfinished" if None in ends else words.duration(max(ends) - event.start)
    nbytes = max(call.nbytes for call in event.calls)
    return f"{event.start * 1000:.3f}", source, target, what, f"{nbytes:,}", took, call.where
