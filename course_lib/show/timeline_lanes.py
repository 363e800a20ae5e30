"""A profiled run as lanes: for each rank, in the steps that are looked at, when it computed, waited and sent."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from course_lib.launch.result import Result
from course_lib.parallel.intervals import Interval, difference, intersection, union
from course_lib.parallel.phases import KINDS
from course_lib.parallel.profiled import Profile
from course_lib.show.events import Event
from course_lib.show.timeline_calls import happened, profiles, ready

_LATE_NOTICE = 0.02  # of the window


@dataclass(frozen=True)
class Part:
    """One rank's part in an event: it waits from `start` to `ready`, then bytes move until `end`."""

    number: int  # of the event, from 1
    event: Event
    start: float
    ready: float
    end: float


@dataclass(frozen=True)
class Lane:
    """One rank. Seconds since the first rank began the first of the steps; nothing lies outside of them."""

    rank: int
    start: float
    end: float
    compute: dict[str, list[Interval]]  # by kind
    backwards: list[Interval]  # inside backward(), computing or waiting
    parts: list[Part]  # may overlap: several buckets can be under way

    @property
    def computing(self) -> list[Interval]:
        return union(piece for pieces in self.compute.values() for piece in pieces)

    @property
    def communicating(self) -> list[Interval]:
        return union((part.start, part.end) for part in self.parts)

    @property
    def moving(self) -> list[Interval]:
        """While bytes of at least one call move."""
        return union((part.ready, part.end) for part in self.parts)

    @property
    def waiting(self) -> list[Interval]:
        """While no call does more than wait for another rank."""
        return difference(self.communicating, self.moving)

    @property
    def exposed(self) -> list[Interval]:
        """Communication with no computing beside it."""
        return difference(self.communicating, self.computing)


@dataclass(frozen=True)
class Story:
    """All ranks, and what happened between them in the steps, by start time."""

    lanes: list[Lane]
    events: list[Event] = field(repr=False)
    steps: int  # how many are looked at
    of: int  # how many there were


def story(r: Result, steps: int | None, caller: str) -> Story:
    """The last `steps` steps of a profiled run; None: all that was profiled."""
    found = profiles(r, caller)
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(
            f"show.{caller} looks at the last steps: give steps=1 or more, or None for all; not {steps!r}."
        )
    there = min(len(profile.steps) for profile in found)
    looked = there if steps is None else min(steps, there)
    first_to_last = {p.rank: (p.steps[-looked][0], p.steps[-1][1]) for p in found}
    windows = {p.rank: (p.begin, p.end) for p in found} if steps is None else first_to_last
    origin = min(start for start, _ in windows.values())
    windows = {rank: (start - origin, end - origin) for rank, (start, end) in windows.items()}
    relevant: list[Event] = []
    parts: dict[int, list[Part]] = {profile.rank: [] for profile in found}
    for event in happened(r, found, origin):
        if pieces := _parts(event, windows, len(relevant) + 1):
            relevant.append(event)
        for rank, part in pieces.items():
            parts[rank].append(part)
    return Story([_lane(p, windows[p.rank], origin, parts[p.rank]) for p in found], relevant, looked, there)


def _lane(profile: Profile, window: Interval, origin: float, parts: list[Part]) -> Lane:
    def inside(pieces: Iterable[Interval]) -> list[Interval]:
        return intersection([(start - origin, end - origin) for start, end in pieces], [window])

    compute = {kind: inside((s.start, s.end) for s in profile.compute if s.kind == kind) for kind in KINDS}
    return Lane(profile.rank, *window, compute, inside(profile.backwards), parts)


def _parts(event: Event, windows: dict[int, Interval], number: int) -> dict[int, Part]:
    """What of the event lies in the windows of its ranks.

    Another thread notes that a collective has ended, maybe when the rank itself is already in its next step: such a
    short rest is no communication of that step.
    """
    found, since = {}, ready(event)
    for call in event.calls:
        low, high = windows[call.rank]
        start, end = max(call.start, low), min(call.end, high)
        rest = call.start < low and end - low < _LATE_NOTICE * (high - low)
        if end > start and not rest:
            found[call.rank] = Part(number, event, start, min(max(since, start), end), end)
    return found
