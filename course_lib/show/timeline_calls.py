"""The communication of a profiled run, with the true ends and on the clock of the run.

`r.messages` knows who called what, with how many bytes. Of an asynchronous call it knows only when somebody's
`wait()` returned, which may be long after the work was done; that is in the profiler's record.
"""

from bisect import bisect_right
from dataclasses import replace

from course_lib.launch.result import Message, Result
from course_lib.parallel.phases import Span
from course_lib.parallel.profiled import Profile
from course_lib.show.events import RECEIVES, SENDS, Event, Transfer, events

_POINT_TO_POINT = (*SENDS, *RECEIVES, "send_recv")
_ROOTED = ("broadcast", "scatter")  # what comes from one rank: its late receivers keep nobody waiting


def profiles(r: Result, caller: str) -> list[Profile]:
    """What the ranks of a profiled run brought back."""
    found = getattr(r, "results", None)
    if not found or not all(isinstance(profile, Profile) for profile in found):
        raise TypeError(
            f"show.{caller} needs a profiled run: r = run(show.profiled(train_steps), ranks=2), then show.{caller}(r)."
        )
    return sorted(found, key=lambda profile: profile.rank)


def zero(r: Result, found: list[Profile]) -> float:
    """The moment of time.monotonic() from which the run's messages count.

    `profiled` enters a barrier just before it notes `begin`, and that barrier is among the messages. Without
    messages (run(..., watch=False)) the first rank's beginning will do.
    """
    meetings: dict[int, list[float]] = {profile.rank: [] for profile in found}
    for message in r.messages:
        if message.op == "barrier" and message.where.startswith("profiled.py,"):
            meetings[message.rank].append(message.end)
    known = [p.begin - meetings[p.rank][p.turn] for p in found if p.turn < len(meetings[p.rank])]
    return min(known or [profile.begin for profile in found])


def happened(r: Result, found: list[Profile], origin: float) -> list[Event]:
    """Transfers and collectives from the profile's beginning on, by time, in seconds after `origin`."""
    shift = zero(r, found) - origin
    calls = [replace(m, start=m.start + shift, end=None if m.end is None else m.end + shift) for m in r.messages]
    torchs = [call for profile in found for call in _torchs(calls, profile, origin, len(found))]
    ours = [
        Message(profile.rank, call.op, None, call.nbytes, call.start - origin, call.end - origin,
                "Communicator", ranks=tuple(range(len(found))))
        for profile in found for call in profile.calls
    ]  # fmt: skip
    begin = min(profile.begin for profile in found) - origin
    both = [event for part in (torchs, ours) for event in events(part)]
    both = [event for event in both if max(call.start for call in event.calls) >= begin]
    return sorted(both, key=lambda event: event.start)


def ready(event: Event) -> float:
    """When the last rank that the others need has come: before that they can only wait, after it bytes move."""
    if isinstance(event, Transfer) or event.calls[0].op not in _ROOTED:
        return max(call.start for call in event.calls)
    root = [call.start for call in event.calls if call.rank == call.peer]
    return root[0] if root else event.start


def _torchs(messages: list[Message], profile: Profile, origin: float, size: int) -> list[Message]:
    """The rank's calls of torch.distributed, corrected; not those that a Communicator made by itself."""
    inside = [(call.start - origin, call.end - origin) for call in profile.calls]
    spans = [Span(s.kind, s.start - origin, s.end - origin) for s in profile.communication]
    spans = [span for span in spans if span.kind not in _POINT_TO_POINT]
    mine = [message for message in messages if message.rank == profile.rank]
    mine = [m for m in mine if m.op not in _POINT_TO_POINT or not any(a <= m.start <= b for a, b in inside)]
    if not any(message.op not in _POINT_TO_POINT for message in mine):  # nobody watched
        group = tuple(range(size))
        return mine + [Message(profile.rank, s.kind, None, 0, s.start, s.end, "?", ranks=group) for s in spans]
    begin, end = profile.begin - origin, profile.end - origin
    checked = [m for m in mine if m.op not in _POINT_TO_POINT and begin <= m.start <= end]
    others = [m for m in mine if m.op in _POINT_TO_POINT or not begin <= m.start <= end]
    fixed = others + _corrected(sorted(checked, key=lambda m: m.start), spans, profile.gpu)
    return [m if m.end is not None else replace(m, end=max(end, m.start)) for m in fixed]


def _corrected(calls: list[Message], spans: list[Span], gpu: bool) -> list[Message]:
    """Calls with better ends: `wait()` returns when the work is done or later, and the backend's span ends then or
    later, too, when its thread is late. A GPU starts later than the call: there the kernels say it all."""
    if len(calls) == len(spans):
        if gpu:
            return [replace(call, start=s.start, end=s.end) for call, s in zip(calls, spans, strict=True)]
        return [_earlier(call, span.end) for call, span in zip(calls, spans, strict=True)]
    if gpu or not calls:  # which kernel belongs to which call is not known
        return calls
    # Some calls consist of several collectives (all_gather_object), others ran on a thread that nobody profiled: a
    # span belongs to the last call before it.
    starts, ends = [call.start for call in calls], [None] * len(calls)
    for span in spans:
        place = max(bisect_right(starts, span.start) - 1, 0)
        ends[place] = max(span.end, ends[place] or span.end)
    return [_earlier(call, end) for call, end in zip(calls, ends, strict=True)]


def _earlier(call: Message, end: float | None) -> Message:
    known = [each for each in (call.end, end) if each is not None and each >= call.start]
    return replace(call, end=min(known, default=None))
