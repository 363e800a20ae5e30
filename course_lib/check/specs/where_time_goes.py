"""Exercise 11, first part: a trace as a table of milliseconds. Judged by value against another way to count."""

import math
import random
from typing import Any

from course_lib.check.findings import told_apart
from course_lib.check.spec import Answer, Case, Spec
from course_lib.check.specs.where_time_goes_mistakes import MISTAKES
from course_lib.check.specs.where_time_oracle import PARTS, table
from course_lib.check.specs.where_time_traces import Habits, Trace, brief, trace


def cases(rng: random.Random) -> list[Case]:
    """Traces in which spans nest and overlap, of one step and several, of one rank and of ranks that do not start at 0.

    The first one tells all known mistakes apart.
    """
    found = [_case("nested spans, buckets at the same time, a loader's worker", _rich(rng, range(3)))]
    found += [_case(found[0].group, _rich(rng, range(rng.randint(2, 5)))) for _ in range(2)]
    found += [_case("several steps", _rich(rng, range(3), steps)) for steps in (2, 3)]
    first = rng.randint(2, 9) * 4
    found.append(_case("ranks of another node", _rich(rng, range(first, first + 4))))
    alone = {0: Habits(rng.randint(4000, 9000), data=rng.randint(500, 900), loader=rng.randint(300, 600))}
    return [*found, _case("one rank, no communication", trace(rng, alone, []))]


def _rich(rng: random.Random, ranks: range, steps: int = 1) -> Trace:
    habits = {
        rank: Habits(
            compute=rng.randint(6000, 12000), data=rng.randint(800, 3000), pause=rng.randint(100, 900),
            loader=rng.randint(900, 2500), tail=rng.randint(900, 1500), update=rng.randint(300, 700),
        )
        for rank in ranks
    }  # fmt: skip
    moves = [rng.randint(200, 400), rng.randint(6500, 8000), rng.randint(6500, 8000)]  # the first one can be hidden
    return trace(rng, habits, moves, steps)


def _case(group: str, spans: Trace) -> Case:
    return Case(group, brief(spans), (spans,), table(spans))


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs first."""
    if answer.error:
        said = f": {answer.message}" if answer.message else ""
        return f"the function raised {answer.error}{said}."
    if wrong := _form(answer.value, case.expected):
        return wrong
    for rank, parts in case.expected.items():
        for part in PARTS:
            if not math.isclose(answer.value[rank][part], parts[part], rel_tol=1e-9, abs_tol=1e-6):
                got, want = told_apart(float(answer.value[rank][part]), round(parts[part], 6))
                return f"rank {rank}, {part}: {want} ms was expected, the function returned {got}."
    return None


def _form(value: Any, expected: dict) -> str | None:
    if not isinstance(value, dict):
        return f"a dict by rank was expected; the function returned {value!r:.60}."
    if value.keys() != expected.keys():
        return f"the ranks {sorted(expected)} were expected as keys; the function returned {list(value)!r:.60}."
    for rank, parts in value.items():
        if not isinstance(parts, dict) or parts.keys() != set(PARTS):
            return f"rank {rank}: a dict with {', '.join(PARTS)} was expected; the function returned {parts!r:.80}."
        for part, number in parts.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                return f"rank {rank}, {part}: a number was expected; the function returned {number!r:.60}."
    return None


SPEC = Spec("11_where_time_goes", "where_time_goes", 6, cases, MISTAKES, compare)
