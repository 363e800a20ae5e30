"""Exercise 11: what is right, by cutting time at each start and end and asking what happens in each piece."""

from bisect import bisect_left
from collections.abc import Iterable
from statistics import mean
from typing import NamedTuple

from course_lib.check.specs.where_time_traces import Trace

PARTS = ("compute", "exposed", "data", "idle")
COMPUTE = ("forward", "backward", "optimizer")
LEAST = 0.1  # of the step: what the others must lose before there is a thief


def table(spans: Trace) -> dict[int, dict[str, float]]:
    """Milliseconds of each rank by part."""
    cuts = sorted({moment for _, _, *ends in spans for moment in ends})
    kinds: dict[int, list[set[str]]] = {rank: [set() for _ in cuts] for rank, *_ in spans}
    for rank, kind, start, end in spans:
        for number in range(bisect_left(cuts, start), bisect_left(cuts, end)):
            kinds[rank][number].add(kind)
    found = {}
    for rank, pieces in kinds.items():
        found[rank] = dict.fromkeys(PARTS, 0.0)
        for number, here in enumerate(pieces[:-1]):
            found[rank][_part(here)] += (cuts[number + 1] - cuts[number]) / 1000
    return found


def _part(kinds: Iterable[str]) -> str:
    if any(kind in kinds for kind in COMPUTE):
        return "compute"
    return "exposed" if "communication" in kinds else "data" if "data" in kinds else "idle"


class Judgement(NamedTuple):
    """Who and why, and by how much it is so."""

    thief: tuple[int, str] | None
    waiting: dict[int, float]  # milliseconds, by rank
    lost: float  # milliseconds that the others lose more than the suspect
    exposed: float  # of the suspect
    step: float
    more: dict[str, float]  # what the suspect has more of than the others

    def clear(self) -> bool:
        """No comparison in it is a close one."""
        least, second = sorted(self.waiting.values())[:2]
        first, next_one = sorted(self.more.values(), reverse=True)[:2]
        limits = (self.lost / (LEAST * self.step), self.lost / max(self.exposed, 1e-9))
        if self.thief is None:
            return min(limits) < 0.6
        return least < 0.6 * second and first > 1.6 * max(next_one, 0) and min(limits) > 1.5


def judgement(spans: Trace) -> Judgement | None:
    """None for one rank alone."""
    times = table(spans)
    if len(times) < 2:
        return None
    calls = {r: sorted(start for rank, kind, start, _ in spans if (rank, kind) == (r, "communication")) for r in times}
    waiting = dict.fromkeys(times, 0.0)
    for starts in zip(*calls.values(), strict=True):
        for rank, start in zip(calls, starts, strict=True):
            waiting[rank] += (max(starts) - start) / 1000
    suspect = min(waiting, key=waiting.get)
    others = [parts for rank, parts in times.items() if rank != suspect]
    more = {part: times[suspect][part] - mean(parts[part] for parts in others) for part in PARTS}
    lost, exposed, step = -more.pop("exposed"), times[suspect]["exposed"], sum(times[suspect].values())
    guilty = lost >= LEAST * step and lost >= exposed
    return Judgement((suspect, max(more, key=more.get)) if guilty else None, waiting, lost, exposed, step, more)
