"""What people get wrong about a pipeline's bubble. A wrong way is recognised by the number that comes of it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean

from course_lib.check.spec import Answer, Case, Mistake
from course_lib.check.specs.bubble_oracle import Schedule

Times = Sequence[float]
Span = tuple[int, str, float, float]  # stage, kind, start, end
Way = Callable[[Schedule, Times, Times], float]
NEVER = 10**6  # rounds: more than any schedule has ops


def _neighbours(stage: int, kind: str, stages: int) -> list[int]:
    """The stage whose op of the same kind and microbatch comes first; none for the first forward and last backward."""
    found = stage - 1 if kind == "forward" else stage + 1
    return [found] if 0 <= found < stages else []


def spans(
    schedule: Schedule,
    forward: Times,
    backward: Times,
    waits: Sequence[str] = ("forward", "backward"),
    alone: bool = True,
) -> list[Span]:
    """All ops: starts are moved later until nothing contradicts. That is another way than the oracle's.

    waits   kinds that wait for another stage
    alone   a stage does one op at a time
    """
    stages, ends = len(schedule), {(s, *op): 0.0 for s, ops in enumerate(schedule) for op in ops}
    length = {"forward": forward, "backward": backward}
    for _ in range(NEVER):
        before = dict(ends)
        for stage, ops in enumerate(schedule):
            free = 0.0
            for kind, m in ops:
                others = _neighbours(stage, kind, stages) if kind in waits else []
                own = [ends[stage, "forward", m]] if kind == "backward" else []
                start = max([free, *own, *(ends[other, kind, m] for other in others)])
                ends[stage, kind, m] = start + length[kind][stage]
                free = ends[stage, kind, m] if alone else 0.0
        if ends == before:
            break
    return [(stage, kind, end - length[kind][stage], end) for (stage, kind, _), end in ends.items()]


def _whole(found: Sequence[Span]) -> float:
    return max(end for *_, end in found)


def _busy(found: Sequence[Span], stage: int | None = None) -> float:
    return sum(end - start for s, _, start, end in found if stage in (None, s))


def share(found: Sequence[Span], whole: float | None = None) -> float:
    """The part of the time in which the stages of these spans wait."""
    stages = len({stage for stage, *_ in found})
    return 1 - _busy(found) / (stages * (whole or _whole(found)))


def _microbatches(schedule: Schedule) -> int:
    return len(schedule[0]) // 2


def _closed(schedule: Schedule, forward: Times, backward: Times) -> float:
    stages = len(schedule)
    return (stages - 1) / (_microbatches(schedule) + stages - 1)


def _per_work(schedule: Schedule, forward: Times, backward: Times) -> float:
    found = spans(schedule, forward, backward)
    return len(schedule) * _whole(found) / _busy(found) - 1


def _slowest(schedule: Schedule, forward: Times, backward: Times) -> float:
    slots = _microbatches(schedule) + len(schedule) - 1
    return share(spans(schedule, forward, backward), slots * (max(forward) + max(backward)))


def _lockstep(schedule: Schedule, forward: Times, backward: Times) -> float:
    """A clock for all: in each beat every stage that has something to do does one op, the longest ends the beat."""
    stages, total = len(schedule), 0.0
    for lengths in (forward, backward[::-1]):
        for beat in range(_microbatches(schedule) + stages - 1):
            total += max(lengths[s] for s in range(stages) if 0 <= beat - s < _microbatches(schedule))
    return share(spans(schedule, forward, backward), total)


def _as_gpipe(schedule: Schedule, forward: Times, backward: Times) -> float:
    order = [[op for kind in ("forward", "backward") for op in ops if op[0] == kind] for ops in schedule]
    return share(spans(order, forward, backward))


def _own_span(schedule: Schedule, forward: Times, backward: Times) -> float:
    found = spans(schedule, forward, backward)
    own = [[(start, end) for s, _, start, end in found if s == stage] for stage in range(len(schedule))]
    wholes = [max(end for _, end in of_stage) - min(start for start, _ in of_stage) for of_stage in own]
    return 1 - _busy(found) / sum(wholes)


def _mean_of_own_spans(schedule: Schedule, forward: Times, backward: Times) -> float:
    found = spans(schedule, forward, backward)
    own = [[span for span in found if span[0] == stage] for stage in range(len(schedule))]
    return mean(share(of_stage, _whole(of_stage) - min(start for *_, start, _ in of_stage)) for of_stage in own)


def _forwards_only(schedule: Schedule, forward: Times, backward: Times) -> float:
    return share(spans([[op for op in ops if op[0] == "forward"] for ops in schedule], forward, backward))


def _last_start(schedule: Schedule, forward: Times, backward: Times) -> float:
    found = spans(schedule, forward, backward)
    return share(found, max(start for *_, start, _ in found))


def _of(stage: Callable[[list[float]], float]) -> Way:
    """Of the shares by stage, one."""

    def way(schedule: Schedule, forward: Times, backward: Times) -> float:
        found = spans(schedule, forward, backward)
        return stage([1 - _busy(found, s) / _whole(found) for s in range(len(schedule))])

    return way


def _idle(schedule: Schedule, forward: Times, backward: Times) -> float:
    """In microseconds, all stages together."""
    found = spans(schedule, forward, backward)
    return len(schedule) * _whole(found) - _busy(found)


def _by(**knobs) -> Way:
    return lambda schedule, forward, backward: share(spans(schedule, forward, backward, **knobs))


def _fits(ways: Sequence[Way], case: Case, answer: Answer) -> bool:
    if isinstance(answer.value, bool) or not isinstance(answer.value, int | float):
        return False

    def is_it(value: float) -> bool:
        return math.isclose(answer.value, value, rel_tol=1e-9, abs_tol=1e-9)

    return any(is_it(way(*case.inputs)) for way in ways)


def _wrong(name: str, says: str, *ways: Way) -> Mistake:
    return Mistake(name, partial(_fits, ways), says)


_FORM = (
    _wrong(
        "closed_formula",
        "That is (P - 1) / (M + P - 1). It holds where all stages are equally long, and here they are not: a stage "
        "waits for a slower one before or behind it, too. Compute when each op starts and ends.",
        _closed,
    ),
    _wrong(
        "busy_share",
        "That is the part of the time in which stages work. The bubble is the rest: 1 minus it.",
        lambda *inputs: 1 - share(spans(*inputs)),
    ),
    _wrong(
        "per_work",
        "That is waiting divided by *work*, as some papers count it. Here the bubble is waiting divided by all the "
        "time: stages times the time from the first start to the last end.",
        _per_work,
    ),
    _wrong(
        "microseconds",
        "That is a time. A share of the time was asked for, from 0 to 1: divide by the number of stages and by the "
        "time from the first start to the last end.",
        _idle,
        lambda *inputs: _idle(*inputs) / len(inputs[0]),
        lambda *inputs: _idle(*inputs) / _whole(spans(*inputs)),
    ),
    _wrong("per_cent", "That is per cent. A share was asked for, from 0 to 1.", lambda *inputs: 100 * _by()(*inputs)),
)
_WHOLE = (
    _wrong(
        "one_stage_only",
        "That is the share of one stage. All of them are asked for: add up what each works, and compare it with the "
        "number of stages times the whole time.",
        _of(lambda shares: shares[0]),
        _of(lambda shares: shares[-1]),
        _of(max),
        _of(min),
    ),
    _wrong(
        "own_span",
        "Each stage is looked at from its own first op to its own last. But it waits already before its first one, "
        "while the pipeline fills. Count from the first start to the last end of all stages.",
        _own_span,
        _mean_of_own_spans,
    ),
    _wrong(
        "last_start",
        "The whole time ends where the last op *starts*. Take the last end.",
        _last_start,
    ),
    _wrong(
        "forwards_only",
        "Only the forwards are in it. The stages wait again while backwards go from the last stage to the first.",
        _forwards_only,
    ),
    _wrong(
        "slowest_paces_all",
        "Every op is taken to be as long as the slowest stage's. The slowest stage sets the pace only while it has "
        "something to do: while the pipeline fills and empties, the others go as fast as they can.",
        _slowest,
    ),
    _wrong(
        "lockstep",
        "Here all stages step together, and each step is as long as its longest op. There is no such clock: an op "
        "starts as soon as its stage is free and what it waits for is there.",
        _lockstep,
    ),
)
_WAITS = (
    _wrong(
        "backward_does_not_wait",
        "A backward starts here before the stage *behind* it (stage + 1) has done the same microbatch's. That is where "
        "its gradient comes from. If you go through the stages once, from the first on, that end is not known yet.",
        _by(waits=("forward",)),
    ),
    _wrong(
        "forward_does_not_wait",
        "A forward starts here before the stage *before* it (stage - 1) has done the same microbatch's. That is where "
        "its input comes from.",
        _by(waits=("backward",)),
    ),
    _wrong(
        "nobody_waits",
        "The stages do not wait for each other here: each does its ops one after the other. A forward needs the "
        "forward of the stage before, a backward the one of the stage behind.",
        _by(waits=()),
    ),
    _wrong(
        "two_at_once",
        "A stage does several ops at the same time here. It does one after the other: an op starts when its input is "
        "there *and* the stage has ended its op before.",
        _by(alone=False),
    ),
    _wrong(
        "forward_time_twice",
        "A backward takes backward[stage], and forward[stage] was taken for both.",
        lambda schedule, forward, backward: share(spans(schedule, forward, forward)),
    ),
    _wrong(
        "times_exchanged",
        "forward and backward are exchanged.",
        lambda schedule, forward, backward: share(spans(schedule, backward, forward)),
    ),
    _wrong(
        "as_gpipe",
        "That is right for GPipe, which does all forwards first. This schedule has another order, and each stage keeps "
        "to its own: the k-th op of stage s is schedule[s][k].",
        _as_gpipe,
    ),
)
MISTAKES = (
    *_FORM,
    *_WHOLE,
    *_WAITS,
    Mistake(
        "one_stage",
        lambda case, answer: bool(answer.error) and case.group == "one stage",
        "A pipeline of one stage has nobody to wait for. It is allowed, and its bubble is 0.",
    ),
    Mistake(
        "not_known_yet",
        lambda case, answer: answer.error == "KeyError",
        "An op was looked up that has not been computed yet. Backwards come from the last stage, forwards from the "
        "first: going through the stages once is not enough. Go on as long as some stage can.",
    ),
    Mistake(
        "no_neighbour",
        lambda case, answer: answer.error == "IndexError",
        "There is no stage before the first one and none behind the last one: the forward of the one and the backward "
        "of the other wait for no other stage.",
    ),
    Mistake(
        "nothing",
        lambda case, answer: answer.error is None and answer.value is None,
        "The function came to its end without `return`.",
    ),
)


def tells_apart(case: Case) -> bool:
    """Whether no two mistakes, nor a mistake and the right answer, give the same number in this case.

    Where a schedule read backwards is the same one, the times can be exchanged: that shows in others only.
    """
    ways = [_ways(mistake) for mistake in MISTAKES if mistake.name != "times_exchanged"]
    numbers = [{round(way(*case.inputs), 9) for way in found} for found in ways] + [{round(case.expected, 9)}]
    return sum(map(len, numbers)) == len(set().union(*numbers))


def _ways(mistake: Mistake) -> Sequence[Way]:
    return mistake.fits.args[0] if isinstance(mistake.fits, partial) else ()
