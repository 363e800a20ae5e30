"""A timeline in words: the sentence above it, the caption of each collective, the table."""

from course_lib.parallel.intervals import intersection, total
from course_lib.show import sentences, words
from course_lib.show.events import Event, Transfer
from course_lib.show.timeline_calls import ready
from course_lib.show.timeline_lanes import Lane, Story
from course_lib.show.timeline_numbers import Overlap, Times


def title(told: Story) -> str:
    """What is drawn."""
    last = "the last step" if told.steps == 1 else f"the last {told.steps} steps"
    what = last if told.steps < told.of else words.count(told.steps, "step")
    sent = f"{len(told.events):,} times communication" if told.events else "no communication"
    if told.events and not any(isinstance(event, Transfer) for event in told.events):
        sent = words.count(len(told.events), "collective")
    return f"Computing and communication: {words.count(len(told.lanes), 'rank')}, {what}, {sent}"


def overview(told: Story, found: Overlap) -> str:
    """The picture in sentences."""
    longest = max(found, key=lambda times: times.step)
    text = f"{title(told)}. {'A step takes' if found.each else 'All takes'} {words.duration(longest.step)}."
    for times in found:
        text += f" {_rank(times)}"
    return f"{text} {found.blame()}"


def _rank(times: Times) -> str:
    if not times.communication:
        return f"Rank {times.rank} computes for {words.duration(times.compute)} and sends nothing."
    return (
        f"Rank {times.rank} communicates for {words.duration(times.communication)}, {times.share:.0%} of it while it "
        f"computes; {words.duration(times.exposed)} are exposed."
    )


def head(times: Times, found: Overlap) -> str:
    """The line above a lane."""
    if not times.communication:
        return f"rank {times.rank}: no communication"
    return (
        f"rank {times.rank}: {times.share:.0%} of {words.duration(times.communication)} communication overlapped, "
        f"{words.duration(times.exposed)} exposed, {words.duration(times.waiting)} waiting"
        f"{found.each if found.steps != 1 else ''}"
    )


def name(event: Event) -> str:
    """Operation and bytes: "all_reduce 1.1 MB"."""
    if isinstance(event, Transfer):
        call = event.calls[0]
        return f"{event.src} to {event.dst} {words.size(call.nbytes)}"
    nbytes = max(call.nbytes for call in event.calls)
    return "/".join(event.names) + (f" {words.size(nbytes)}" if nbytes else "")


def caption(told: Story, number: int) -> str:
    """What happened in one collective or message, and what each rank did meanwhile."""
    event = told.events[number - 1]
    call = event.calls[0]
    if isinstance(event, Transfer):
        what = sentences.caption(event)
    else:
        what = f"{name(event)} ({call.where})"
        first, last = min(each.start for each in event.calls), ready(event)
        if last > first:
            late = next(each.rank for each in event.calls if each.start == last)
            what += f": rank {late} comes last, {words.duration(last - first)} after the first"
        end = max(each.end for each in event.calls)
        what += f"; then {words.duration(max(end - last, 0))} of transfer"
    return f"{number}. {what}. {' '.join(_beside(lane, number) for lane in told.lanes)}".rstrip()


def _beside(lane: Lane, number: int) -> str:
    for part in lane.parts:
        if part.number == number:
            span = [(part.start, part.end)]
            busy = total(intersection(span, lane.computing)) / total(span)
            return f"Rank {lane.rank} computes during {busy:.0%} of it."
    return ""


def table(told: Story, found: Overlap, most: int = 40) -> str:
    """Numbers, then the collectives one a line."""
    text = f"{title(told)}\n{found!r}"
    for number in range(1, min(len(told.events), most) + 1):
        text += f"\n{caption(told, number)}"
    if len(told.events) > most:
        text += f"\n... and {len(told.events) - most:,} more"
    return text
