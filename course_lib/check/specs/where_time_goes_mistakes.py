"""What people get wrong when they add up a trace. A wrong way is recognised by all the numbers that come of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from course_lib.check.spec import Answer, Case, Mistake
from course_lib.check.specs.where_time_oracle import COMPUTE, PARTS
from course_lib.check.specs.where_time_traces import Trace
from course_lib.parallel.intervals import Interval, difference, intersection, total, union


@dataclass(frozen=True)
class Lane:
    """The spans of one rank, and how to count each part of its time, in microseconds. A mistake exchanges a way."""

    spans: Trace  # of all ranks
    rank: int
    compute: "Callable[[Lane], float]" = lambda lane: total(lane.of(*COMPUTE))
    exposed: "Callable[[Lane], float]" = lambda lane: total(difference(lane.of("communication"), lane.of(*COMPUTE)))
    data: "Callable[[Lane], float]" = lambda lane: total(
        difference(lane.of("data"), lane.of("communication", *COMPUTE))
    )
    idle: "Callable[[Lane], float] | None" = None  # the rest

    def of(self, *kinds: str) -> list[Interval]:
        """This rank's spans of these kinds."""
        return [(start, end) for rank, kind, start, end in self.spans if rank == self.rank and kind in kinds]

    def step(self) -> float:
        """From the first start to the last end of all ranks."""
        return max(end for *_, end in self.spans) - min(start for _, _, start, _ in self.spans)

    def numbers(self) -> dict[str, float]:
        """Microseconds by part, without the rest."""
        found = {part: getattr(self, part)(self) for part in PARTS[:3]}
        return found | ({"idle": self.idle(self)} if self.idle else {})


def added(pieces: list[Interval]) -> float:
    """The sum of the lengths, which is wrong where pieces overlap."""
    return sum(end - start for start, end in pieces)


def _equal(value: object, lanes: list[Lane], scale: Callable[[Lane], float]) -> bool:
    """Whether `value` has the numbers of these lanes."""
    for lane in lanes:
        for part, number in lane.numbers().items():
            got = value[lane.rank][part]
            if not math.isclose(got, number * scale(lane), rel_tol=1e-9, abs_tol=1e-9):
                return False
    return True


def _fits(scale: Callable[[Lane], float], ways: dict, case: Case, answer: Answer) -> bool:
    if not isinstance(answer.value, dict):
        return False
    lanes = [replace(Lane(case.inputs[0], rank), **ways) for rank in case.expected]
    try:
        return not _equal(case.expected, lanes, scale) and _equal(answer.value, lanes, scale)
    except (KeyError, TypeError):  # an answer of another form
        return False


def _wrong(name: str, says: str, scale: Callable[[Lane], float] = lambda lane: 0.001, **ways: Callable) -> Mistake:
    return Mistake(name, partial(_fits, scale, ways), says)


def _raises(name: str, error: str, says: str) -> Mistake:
    return Mistake(name, lambda case, answer: answer.error == error, says)


def _busy(lane: Lane) -> float:
    return total(lane.of("data", "communication", *COMPUTE))


def _own_step(lane: Lane) -> float:
    ends = lane.of("data", "communication", *COMPUTE)
    return max(end for _, end in ends) - min(start for start, _ in ends)


def _first_to_last(lane: Lane) -> float:
    ends = lane.of(*COMPUTE)
    return max(end for _, end in ends) - min(start for start, _ in ends)


def _all_or_nothing(lane: Lane) -> float:
    covered = union(lane.of(*COMPUTE))
    free = [(s, e) for s, e in lane.of("communication") if not any(a <= s and e <= b for a, b in covered)]
    return total(free)


def _not_even_touched(lane: Lane) -> float:
    covered = lane.of(*COMPUTE)
    return total([(s, e) for s, e in lane.of("communication") if not intersection([(s, e)], covered)])


def _pairwise(lane: Lane) -> float:
    pairs = [intersection([one], [other]) for one in lane.of("communication") for other in lane.of(*COMPUTE)]
    return added(lane.of("communication")) - sum(total(pair) for pair in pairs)


def _each_alone(lane: Lane) -> float:
    return sum(total(difference([call], lane.of(*COMPUTE))) for call in lane.of("communication"))


def _anybody(lane: Lane) -> list[Interval]:
    return [(start, end) for _, kind, start, end in lane.spans if kind in COMPUTE]


def _last_end(pieces: list[Interval]) -> float:
    """A union that takes the end of the newest piece, also when an older one goes on longer."""
    found: list[list[float]] = []
    for start, end in sorted(pieces):
        if found and start <= found[-1][1]:
            found[-1][1] = end
        else:
            found.append([start, end])
    return added(found)


_UNIONS = (
    _wrong(
        "sums_compute",
        "Compute spans nest and overlap: an operator runs inside of another, a second stream beside the first. Added "
        "up, the same moment counts twice. Take the length of their union.",
        compute=lambda lane: added(lane.of(*COMPUTE)),
    ),
    _wrong(
        "end_of_the_newest",
        "When a span lies inside of an older one, its end is the *earlier* of the two. A union goes on to max(end so "
        "far, this end).",
        compute=lambda lane: _last_end(lane.of(*COMPUTE)),
    ),
    _wrong(
        "first_to_last",
        "From the first start to the last end there are gaps, in which nothing is computed. Only the spans "
        "themselves count.",
        compute=_first_to_last,
    ),
    _wrong(
        "optimizer_forgotten",
        "The optimizer computes, too: compute is forward, backward and optimizer.",
        compute=lambda lane: total(lane.of("forward", "backward")),
    ),
    _wrong(
        "backward_only",
        "Compute is forward, backward *and* optimizer; here it is backward alone.",
        compute=lambda lane: total(lane.of("backward")),
    ),
)
_EXPOSED = (
    _wrong(
        "all_communication",
        "That is all communication. Exposed is what is left when the moments are taken out in which this rank "
        "computes.",
        exposed=lambda lane: total(lane.of("communication")),
    ),
    _wrong(
        "sums_communication",
        "Communication spans overlap: a bucket is handed over while the one before still moves. They are added up "
        "here, with the hidden part and all. Take the union, then take out what is covered by computing.",
        exposed=lambda lane: added(lane.of("communication")),
    ),
    _wrong(
        "each_collective_alone",
        "Each collective's exposed part is right, but two of them can be under way at the same moment, which then "
        "counts twice. First the union of all communication, then take out the computing.",
        exposed=_each_alone,
    ),
    _wrong(
        "subtracts_totals",
        "Total communication minus total compute says nothing about *when*. Of a communication, only the moments "
        "count as hidden in which this rank computes.",
        exposed=lambda lane: max(total(lane.of("communication")) - total(lane.of(*COMPUTE)), 0),
    ),
    _wrong(
        "pairwise",
        "The overlap is taken off for each pair of spans. Where compute spans overlap each other, the same moment is "
        "taken off twice. Make unions first, then intersect them.",
        exposed=_pairwise,
    ),
    _wrong(
        "all_or_nothing",
        "A communication that is covered in part counts in full here. Cut it: only the uncovered moments are exposed.",
        exposed=_all_or_nothing,
    ),
    _wrong(
        "touched_is_hidden",
        "A communication that is covered in part counts as hidden here. Cut it: the uncovered moments are exposed.",
        exposed=_not_even_touched,
    ),
    _wrong(
        "hidden_part",
        "That is the hidden part of the communication. Exposed is the other one, in which this rank computes nothing.",
        exposed=lambda lane: total(intersection(lane.of("communication"), lane.of(*COMPUTE))),
    ),
    _wrong(
        "others_hide_it",
        "Another rank's computing hides nothing: this rank stands still meanwhile. Compare with the spans of the "
        "same rank only.",
        exposed=lambda lane: total(difference(lane.of("communication"), _anybody(lane))),
    ),
    _wrong(
        "data_hide_it",
        "Loading data is no computing: when a rank loads while its communication goes on, that moment is exposed. "
        "Take out forward, backward and optimizer only.",
        exposed=lambda lane: total(difference(lane.of("communication"), lane.of("data", *COMPUTE))),
        data=lambda lane: total(difference(lane.of("data"), lane.of(*COMPUTE))),
    ),
)
_DATA = (
    _wrong(
        "hidden_data",
        "Data that a worker loads while this rank computes or communicates cost nothing, but are counted here. Of "
        "data, only the moments count in which nothing else goes on.",
        data=lambda lane: total(lane.of("data")),
    ),
    _wrong(
        "a_moment_counts_twice",
        "A moment with data *and* exposed communication counts twice here. Each moment counts for the first line of "
        "the table that fits: compute, exposed, data, idle.",
        data=lambda lane: total(difference(lane.of("data"), lane.of(*COMPUTE))),
    ),
)
_STEPS = (
    _wrong(
        "own_step",
        "Idle is counted within this rank's own first and last moment. The step is the same for all ranks: from the "
        "first start to the last end in the whole trace.",
        idle=lambda lane: _own_step(lane) - _busy(lane),
    ),
    _wrong(
        "from_zero",
        "The step is counted from time 0, and the trace begins later. It goes from the first start to the last end.",
        idle=lambda lane: max(end for *_, end in lane.spans) - _busy(lane),
    ),
    _wrong(
        "gaps_forgotten",
        "Idle is 0 everywhere. Nothing is recorded while a rank sleeps, so these moments are in no span: idle is the "
        "step minus the other three.",
        idle=lambda lane: 0,
    ),
    _wrong(
        "microseconds", "The trace is in microseconds; milliseconds were asked for: divide by 1000.", lambda lane: 1
    ),
    _wrong("seconds", "These are seconds; milliseconds were asked for.", lambda lane: 1e-6),
    _wrong("shares", "These are parts of the step; milliseconds were asked for.", lambda lane: 1 / lane.step()),
    _wrong("per_cent", "These are per cent of the step; milliseconds were asked for.", lambda lane: 100 / lane.step()),
    _wrong(
        "per_cent_of_busy",
        "These are parts of the time in which this rank was busy; milliseconds were asked for.",
        lambda lane: 1 / _busy(lane),
    ),
)
MISTAKES = (
    *_UNIONS,
    *_EXPOSED,
    *_DATA,
    *_STEPS,
    _raises(
        "no_such_part",
        "KeyError",
        "A rank may have no span of some kind: one rank alone does not communicate, and ranks may start at any number.",
    ),
    _raises(
        "nothing_to_compare",
        "ValueError",
        "max() or min() of nothing: a rank may have no span of some kind. One rank alone does not communicate.",
    ),
    Mistake(
        "nothing",
        lambda case, answer: answer.error is None and answer.value is None,
        "The function came to its end without `return`.",
    ),
)
