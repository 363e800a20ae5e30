"""Exercise 11, second part: who makes all wait, and why. Judged by the answer; no comparison in a trace is close."""

import random
from collections.abc import Callable

from course_lib.check.spec import Answer, Case, Spec
from course_lib.check.specs.where_time_oracle import judgement
from course_lib.check.specs.where_time_thief_mistakes import MISTAKES
from course_lib.check.specs.where_time_traces import Habits, Trace, brief, trace

KINDS = ("compute", "data", "idle")
TRIES = 200
Ranks = dict[int, Habits]


def cases(rng: random.Random) -> list[Case]:
    """A thief of each kind among innocent ranks that look like one, then traces without a thief."""
    return [
        _case("a rank whose data come late", rng, _late_data),
        _case("a rank that computes longer", rng, _long_compute),
        _case("a rank that does nothing for a while", rng, _sleeper),
        _case("the network is the limit", rng, _slow_network),
        _case("all are slow alike", rng, _all_alike),
        _case("a small difference", rng, _too_little),
        _case("ranks of another node", rng, _another_node),
        _case("one rank alone", rng, _one),
    ]


def _case(group: str, rng: random.Random, make: Callable[[random.Random], tuple[Trace, str | None]]) -> Case:
    for _ in range(TRIES):
        spans, kind = make(rng)
        found = judgement(spans)
        thief = found.thief if found else None
        if (thief and thief[1]) == kind and (found is None or found.clear()):
            return Case(group, f"{group}: {brief(spans)}", (spans,), thief)
    raise RuntimeError(f"no clear trace of the kind {group!r} in {TRIES} tries")


def _even(rng: random.Random, numbers: list[int]) -> Ranks:
    base = rng.randint(9000, 11000)
    return {rank: Habits(compute=base, data=600, pause=100, update=500) for rank in numbers}


def _late_data(rng: random.Random) -> tuple[Trace, str]:
    """One rank is late once, one loads much behind its computing, one computes more, one comes first."""
    numbers = list(range(5))
    ranks = _even(rng, numbers)
    thief, once, loader, busy, early = rng.sample(numbers, 5)
    ranks[thief].data = rng.randint(5500, 6500)
    ranks[once].once = rng.randint(12500, 13500)
    ranks[loader].loader, ranks[loader].data = 8500, 500
    ranks[busy].compute += 1200
    ranks[early].data = 100
    ranks[early].compute -= 400
    return trace(rng, ranks, [500, 500, 500], 4), "data"


def _long_compute(rng: random.Random) -> tuple[Trace, str]:
    """Its loader takes long, too, but behind its computing."""
    numbers = list(range(rng.randint(3, 4)))
    ranks = _even(rng, numbers)
    thief = rng.choice(numbers)
    ranks[thief].compute += rng.randint(5500, 6500)
    ranks[thief].loader = 9500
    return trace(rng, ranks, [600, 600], 3), "compute"


def _sleeper(rng: random.Random) -> tuple[Trace, str]:
    numbers = list(range(rng.randint(3, 4)))
    ranks = _even(rng, numbers)
    ranks[rng.choice(numbers)].pause += rng.randint(5500, 6500)
    return trace(rng, ranks, [600, 600], 3), "idle"


def _slow_network(rng: random.Random) -> tuple[Trace, None]:
    numbers = list(range(3))
    ranks = _even(rng, numbers)
    ranks[rng.choice(numbers)].data += rng.randint(5500, 6500)
    return trace(rng, ranks, [6000, 6000, 6000], 2), None


def _all_alike(rng: random.Random) -> tuple[Trace, None]:
    ranks = _even(rng, list(range(rng.randint(3, 4))))
    for habits in ranks.values():
        habits.data = 9000
    return trace(rng, ranks, [2500], 3), None


def _too_little(rng: random.Random) -> tuple[Trace, None]:
    """The others lose more than the network takes, but it is a small part of the step."""
    numbers = list(range(4))
    ranks = _even(rng, numbers)
    ranks[rng.choice(numbers)].data += 600
    return trace(rng, ranks, [60], 3), None


def _another_node(rng: random.Random) -> tuple[Trace, str]:
    first = 4 * rng.randint(2, 9)
    ranks = _even(rng, list(range(first, first + 4)))
    ranks[first + rng.randint(0, 3)].data += rng.randint(5500, 6500)
    return trace(rng, ranks, [600, 600], 2), "data"


def _one(rng: random.Random) -> tuple[Trace, None]:
    return trace(rng, {0: Habits(9000, data=8000)}, []), None


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs."""
    if answer.error:
        said = f": {answer.message}" if answer.message else ""
        return f"the function raised {answer.error}{said}."
    got = tuple(answer.value) if isinstance(answer.value, list) else answer.value
    if got is not None and not (isinstance(got, tuple) and len(got) == 2 and type(got[0]) is int and got[1] in KINDS):
        return (
            f"(rank, kind) with a kind of {', '.join(KINDS)}, or None was expected; the function returned {got!r:.60}."
        )
    if got != case.expected:
        return f"{case.expected!r} was expected, the function returned {got!r}."
    return None


SPEC = Spec("11_where_time_goes", "thief", 6, cases, MISTAKES, compare)
