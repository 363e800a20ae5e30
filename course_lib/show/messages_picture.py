"""Who sent what to whom, and when: `show.messages(r)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.launch.result import Result
from course_lib.show import sentences, words
from course_lib.show.events import Event, Transfer, events
from course_lib.show.stepper import Stepper
from course_lib.show.still import png
from course_lib.show.svg import svg
from course_lib.show.traffic import draw

if TYPE_CHECKING:
    from course_lib.launch import RunError

_ROWS = 40  # of the plain-text table


def messages(r: Result | RunError, most: int = 200) -> Stepper:
    """Draw the messages of a run: a lane a rank, time to the right, arrows from sender to receiver.

    r      what `run` returned, or the RunError that it raised: a hang can be looked at, too
    most   draw at most this many messages and collectives, the earliest; the caption says so

    Step 0 is the whole picture; the arrow keys then go through the messages in the order of time.
    """
    if not hasattr(r, "messages"):
        raise TypeError(f"show.messages draws what run(...) returned, not {type(r).__name__}.")
    if most < 1:
        raise ValueError(f"show.messages cannot draw {most} messages: give most=1 or more.")
    found = events(r.messages)
    drawn = found[:most]
    ranks = _how_many(r)
    overview = _overview(r, found, ranks)
    if len(drawn) < len(found):
        overview += f" Only the first {len(drawn):,} are drawn."
    if not found:
        overview += " They sent nothing to each other."
    canvas = draw(drawn, ranks, _title(found, ranks))
    table = f"{overview}\n{sentences.table(found, _ROWS)}" if found else overview
    if len(found) > _ROWS:
        table += f"\n... and {len(found) - _ROWS:,} more"
    start = f"{overview} Drag the slider, or press → on it, to go through them." if drawn else overview
    captions = [start, *(sentences.caption(event) for event in drawn)]
    return Stepper([svg(canvas)], captions, png(canvas), overview, table)


def _how_many(r: Result | RunError) -> int:
    """Number of ranks; in a run that failed half-way some may have said nothing."""
    named = [call.rank for call in r.messages] + [call.peer for call in r.messages if call.peer is not None]
    named += [rank for call in r.messages for rank in call.ranks]
    return max([len(r.output), *(rank + 1 for rank in named)])


def _seconds(r: Result | RunError) -> float:
    """Length of the run; a failed one only knows when its calls began and ended."""
    times = [call.start for call in r.messages] + [call.end for call in r.messages if call.end is not None]
    return getattr(r, "seconds", None) or max(times, default=0.0)


def _title(found: list[Event], ranks: int) -> str:
    transfers = sum(isinstance(event, Transfer) for event in found)
    parts = [words.count(ranks, "rank")]
    if transfers or not found:
        parts.append(words.count(transfers, "message") if transfers else "no messages")
    if len(found) > transfers:
        parts.append(words.count(len(found) - transfers, "collective"))
    return "Who sent what to whom: " + ", ".join(parts)


def _overview(r: Result | RunError, found: list[Event], ranks: int) -> str:
    arrived = [event.send for event in found if isinstance(event, Transfer) and event.send and event.recv]
    text = _title(found, ranks)
    if arrived:
        text += f"; {words.size(sum(call.nbytes for call in arrived))} sent from rank to rank"
    text += f"; {words.duration(_seconds(r))} in all."
    lost = sum(isinstance(event, Transfer) and event.recv is None for event in found)
    lonely = sum(isinstance(event, Transfer) and event.send is None for event in found)
    partial = sum(not isinstance(event, Transfer) and bool(event.missing) for event in found)
    if lost:
        text += f" {words.count(lost, 'message')} found no receiver."
    if lonely:
        text += f" {words.count(lonely, 'receive')} found no message."
    if partial:
        text += f" {words.count(partial, 'collective')} not called by every rank."
    return text
