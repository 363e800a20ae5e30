"""Where the time of a training step goes: `show.overlap(r)`."""

from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.launch.result import Result
from course_lib.parallel.intervals import Interval, intersection, total
from course_lib.parallel.phases import KINDS
from course_lib.show import words
from course_lib.show.events import Event
from course_lib.show.timeline_calls import ready
from course_lib.show.timeline_lanes import Lane, Story, story

_WORTH = 0.05  # waiting for a rank counts from this part of a step on


@dataclass(frozen=True)
class Times:
    """One rank; seconds a step."""

    rank: int
    step: float  # from the end of an optimizer.step() to the end of the next
    compute: float  # while operators ran
    kinds: dict[str, float]  # the same by kind: forward, backward, optimizer, other
    communication: float  # while at least one call was under way; = waiting + transfer = overlapped + exposed
    waiting: float  # ... and all of them waited for a rank that had not come yet
    transfer: float  # ... and bytes moved
    overlapped: float  # communication while operators ran
    exposed: float  # communication while none ran
    inside_backward: float  # communication before backward() returned: what is often, wrongly, called overlap
    last: int  # collectives to which this rank came last, of those where somebody waited for somebody
    kept: float  # time for which another rank waited for this one; the mean over the others

    @property
    def share(self) -> float:
        """The part of the communication that is overlapped, 0 to 1; NaN when there was none."""
        return self.overlapped / self.communication if self.communication else float("nan")


@dataclass(frozen=True)
class Overlap:
    """`overlap(r)[k]` are the times of rank k. As the last value of a cell it is a table."""

    ranks: list[Times]
    straggler: int | None  # the rank that is late to the collectives; None: nobody is, or not for long
    steps: int | None  # the times are means over so many; None: they are sums over all that was profiled
    collectives: int  # in these steps

    def __getitem__(self, rank: int) -> Times:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Times]:
        return iter(self.ranks)

    @property
    def each(self) -> str:
        """What stands behind a time."""
        return "" if self.steps is None else " a step"

    def __repr__(self) -> str:
        names = ["step", *KINDS, "communication", "waiting", "transfer", "overlapped", "exposed"]
        rows = [[f"ms{self.each or ' in all'}", *(f"rank {times.rank}" for times in self)]]
        for name in names:
            values = [times.kinds[name] if name in KINDS else getattr(times, name) for times in self]
            rows.append([name, *(f"{value * 1000:,.2f}" for value in values)])
        rows.append(["overlapped, %", *(f"{t.share:.0%}"[:-1] if t.communication else "-" for t in self)])
        wide = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]) for row in rows]
        return "\n".join([*lines, self.blame()])

    def blame(self) -> str:
        """Who is late, as a sentence."""
        if self.straggler is None:
            return "No rank keeps the others waiting for long." if len(self) > 1 else "One rank waits for nobody."
        late = self[self.straggler]
        return (
            f"Rank {late.rank} was late: the others waited {words.duration(late.kept)}{self.each} for it. "
            f"It came last to {late.last} of {self.collectives:,}. The reason is in what it does before."
        )


def overlap(r: Result, steps: int | None = 1) -> Overlap:
    """How much of the communication ran beside computing, and how much made the step longer.

    r       what run(show.profiled(train_steps), ranks=N) returned
    steps   look at the last so many steps, the times are means; None: everything that was profiled, and sums
    """
    return numbers(story(r, steps, "overlap"), steps)


def numbers(told: Story, steps: int | None) -> Overlap:
    """The numbers of what was read already."""
    count = 1 if steps is None else told.steps
    waits = _waits(told)
    times = [_times(told, lane, waits, count) for lane in told.lanes]
    worst = max(times, key=lambda t: t.kept)
    waited = sum(t.kept for t in times)
    late = len(times) > 1 and worst.kept >= _WORTH * worst.step and worst.kept > 0.5 * waited
    return Overlap(times, worst.rank if late else None, steps and count, len(told.events))


def _times(told: Story, lane: Lane, waits: dict[tuple[int, int], list[Interval]], steps: int) -> Times:
    communicating, computing = lane.communicating, lane.computing
    others = [total(waits.get((other.rank, lane.rank), [])) for other in told.lanes if other is not lane]
    seconds = {
        "step": lane.end - lane.start,
        "compute": total(computing),
        "communication": total(communicating),
        "waiting": total(lane.waiting),
        "transfer": total(lane.moving),
        "overlapped": total(intersection(communicating, computing)),
        "exposed": total(lane.exposed),
        "inside_backward": total(intersection(communicating, lane.backwards)),
        "kept": sum(others) / max(len(others), 1),
    }
    kinds = {kind: total(lane.compute[kind]) / steps for kind in KINDS}
    last = sum(_last(event) == lane.rank for event in told.events)
    return Times(lane.rank, kinds=kinds, last=last, **{name: value / steps for name, value in seconds.items()})


def _waits(told: Story) -> dict[tuple[int, int], list[Interval]]:
    """(who waited, for whom): when."""
    found: dict[tuple[int, int], list[Interval]] = {}
    for lane in told.lanes:
        for part in lane.parts:
            if part.ready > part.start and (late := _last(part.event)) not in (None, lane.rank):
                found.setdefault((lane.rank, late), []).append((part.start, part.ready))
    return found


def _last(event: Event) -> int | None:
    """The rank that the others waited for; nobody if it was alone."""
    since = ready(event)
    late = [call.rank for call in event.calls if call.start == since]
    return late[0] if late and any(call.start < since for call in event.calls) else None
