"""Exercise 12, second part: the bubble of a pipeline whose stages are not equally long."""

import math
import random
from collections.abc import Callable

from course_lib.check.findings import told_apart
from course_lib.check.spec import Answer, Case, Spec
from course_lib.check.specs.bubble_mistakes import MISTAKES, tells_apart
from course_lib.check.specs.bubble_oracle import Schedule, waiting
from course_lib.parallel import pipeline_schedule

TRIES = 50


def cases(rng: random.Random) -> list[Case]:
    """Schedules of several kinds, times in microseconds. The first one tells all known mistakes apart."""
    found = [_telling(rng)]
    found += [_case(rng, found[0].group, _one_f_one_b, rng.randint(3, 5), rng.randint(4, 8)) for _ in range(2)]
    gpipe = "GPipe, stages that are not equally long"
    found += [_case(rng, gpipe, _gpipe, rng.randint(2, 5), rng.randint(3, 8)) for _ in range(3)]
    found += [_case(rng, "an order of its own", _own_order, rng.randint(3, 4), rng.randint(4, 6)) for _ in range(3)]
    found += [_case(rng, "equal stages", make, rng.randint(2, 4), 5, equal=True) for make in (_gpipe, _one_f_one_b)]
    return [*found, _case(rng, "one microbatch", _gpipe, 3, 1), _case(rng, "one stage", _one_f_one_b, 1, 3)]


def _telling(rng: random.Random) -> Case:
    for _ in range(TRIES):
        found = _case(rng, "1F1B, stages that are not equally long", _one_f_one_b, 4, 6)
        if tells_apart(found):
            return found
    raise RuntimeError(f"no schedule that tells the mistakes apart in {TRIES} tries")


def _plain(schedule: list[list[pipeline_schedule.Op]]) -> Schedule:
    return [[(op.kind, op.microbatch) for op in ops] for ops in schedule]


def _gpipe(rng: random.Random, stages: int, microbatches: int) -> Schedule:
    return _plain(pipeline_schedule.gpipe(stages, microbatches))


def _one_f_one_b(rng: random.Random, stages: int, microbatches: int) -> Schedule:
    return _plain(pipeline_schedule.one_f_one_b(stages, microbatches))


def _own_order(rng: random.Random, stages: int, microbatches: int) -> Schedule:
    """One op after the other, any that can be done next: so no stage ever waits in vain."""
    found: list[list[tuple[str, int]]] = [[] for _ in range(stages)]
    while any(len(ops) < 2 * microbatches for ops in found):
        ready = [(s, m) for s in range(stages) for m in range(microbatches) if _next(found, s, m)]
        stage, m = rng.choice(ready)
        found[stage].append((_next(found, stage, m), m))
    return found


def _next(found: Schedule, stage: int, m: int) -> str | None:
    """What can be done with this microbatch on this stage now: "forward", "backward" or nothing."""
    if ("forward", m) not in found[stage]:
        return "forward" if stage == 0 or ("forward", m) in found[stage - 1] else None
    behind = stage + 1 == len(found) or ("backward", m) in found[stage + 1]
    return "backward" if behind and ("backward", m) not in found[stage] else None


def _case(rng: random.Random, group: str, make: Callable, stages: int, microbatches: int, equal: bool = False) -> Case:
    schedule = make(rng, stages, microbatches)
    forward = [rng.randint(2000, 3900)] * stages if equal else rng.sample(range(2000, 9000, 10), stages)
    backward = [2 * length for length in forward] if equal else rng.sample(range(4100, 16000, 10), stages)
    count = f"{stages} stage{'s' * (stages > 1)}, {microbatches} microbatch{'es' * (microbatches > 1)}"
    story = f"{group}: {count}, forward={forward}, backward={backward}"
    return Case(group, story, (schedule, forward, backward), waiting(schedule, forward, backward))


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs."""
    if answer.error:
        said = f": {answer.message}" if answer.message else ""
        return f"the function raised {answer.error}{said}."
    if isinstance(answer.value, bool) or not isinstance(answer.value, int | float):
        return f"a number from 0 to 1 was expected; the function returned {answer.value!r:.60}."
    if not math.isclose(answer.value, case.expected, rel_tol=1e-9, abs_tol=1e-9):
        got, want = told_apart(float(answer.value), float(case.expected))
        return f"{want} was expected, the function returned {got}."
    return None


SPEC = Spec("12_memory_and_beyond", "bubble", 6, cases, MISTAKES, compare)
