"""Exercise 16, the plan: numbers of a run before it runs. Judged by value, against counting step by step."""

import random
from collections.abc import Mapping
from numbers import Real
from typing import Any

from course_lib.check.findings import told_apart
from course_lib.check.project.plan_mistakes import MISTAKES, close
from course_lib.check.spec import Answer, Case, Spec

NAMES = ("parameters", "samples", "global_batch", "ranks", "epochs", "warmup_epochs", "lr", "reference")
KEYS = ("gradient_bytes", "sent_bytes", "steps", "samples_of_ranks", "samples_at_the_end", "peak", "first_rate")
LISTS = ("samples_of_ranks", "samples_at_the_end")


def right(
    parameters: int,
    samples: int,
    global_batch: int,
    ranks: int,
    epochs: int,
    warmup_epochs: float,
    lr: float,
    reference: int,
) -> dict[str, Any]:
    """Message by message, step by step, sample by sample; no closed formula."""  # fmt: skip
    sent, chunk = 0.0, 4 * parameters / ranks
    for _ in range(ranks - 1):
        sent += chunk  # reduce-scatter
        sent += chunk  # all-gather
    per_epoch, left = 0, samples
    while left > 0:
        last, left, per_epoch = min(left, global_batch), left - global_batch, per_epoch + 1
    peak = sum(lr / reference for _ in range(global_batch))
    warmup = round(warmup_epochs * per_epoch)
    return {
        "gradient_bytes": sum(4 for _ in range(parameters)),
        "sent_bytes": sent,
        "steps": sum(per_epoch for _ in range(epochs)),
        "samples_of_ranks": dealt(global_batch, ranks),
        "samples_at_the_end": dealt(last, ranks),
        "peak": peak,
        "first_rate": peak / warmup if warmup else peak,
    }


def dealt(samples: int, ranks: int) -> list[int]:
    """How many each rank gets, dealt like cards.

    >>> dealt(5, 3)
    [2, 2, 1]
    """
    hands = [0] * ranks
    for card in range(samples):
        hands[card % ranks] += 1
    return hands


def _run(rng: random.Random) -> dict[str, Any]:
    """A run in which every mistake has another value: a tail that does not divide, no round numbers."""
    ranks, share = rng.choice([3, 5, 6, 7]), rng.randint(9, 16)
    batch = ranks * share
    tail = ranks * rng.randint(2, share - 4) + rng.randint(1, ranks - 1)
    return {
        "parameters": rng.randint(1000, 9000) * ranks * 2 + 1,
        "samples": batch * rng.randint(8, 20) + tail,
        "global_batch": batch,
        "ranks": ranks,
        "epochs": rng.randint(4, 9),
        "warmup_epochs": rng.choice([2, 3]),
        "lr": round(rng.uniform(0.02, 0.2), 3),
        "reference": rng.choice([16, 32, 256]) + 1,
    }


def _case(group: str, values: dict[str, Any], expected: Any = None) -> Case:
    inputs = tuple(values[name] for name in NAMES)
    story = f"plan({', '.join(f'{name}={values[name]!r}' for name in NAMES)})"
    return Case(group, story, inputs, expected or right(*inputs))


def cases(rng: random.Random) -> list[Case]:
    """Ordinary runs, then the edges."""
    found = [_case("bytes, steps, samples and rates of a run", _run(rng)) for _ in range(3)]
    run = _run(rng)
    even = {"samples": run["global_batch"] * rng.randint(8, 20)}
    few = {"samples": run["global_batch"] * rng.randint(8, 20) + rng.randint(1, run["ranks"] - 1)}
    found += [_case("an epoch that comes out even", run | even), _case("a last step for a few ranks only", run | few)]
    found.append(_case("half an epoch of warm-up", run | {"warmup_epochs": 0.5}))
    found.append(_case("no warm-up", run | {"warmup_epochs": 0}))
    found.append(_case("one rank", run | {"ranks": 1}))
    odd = {"global_batch": run["global_batch"] + rng.randint(1, run["ranks"] - 1)}
    return [*found, _case("a batch that cannot be divided", run | odd, ValueError)]


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs first, in the order of KEYS."""
    if case.expected is ValueError:
        if "ValueError" in answer.kinds:
            return None
        got = f"raised {_raised(answer)}" if answer.error else "returned a plan"
        return f"a ValueError was expected, as the ranks cannot have equal parts; the function {got}."
    if answer.error:
        return f"the function raised {_raised(answer)}."
    if not isinstance(answer.value, Mapping):
        return f"a dict was expected; the function returned {_short(answer.value)}."
    if missing := [key for key in KEYS if key not in answer.value]:
        return f"the plan has no {', '.join(missing)}."
    return next(filter(None, (_differs(key, answer.value[key], case.expected[key]) for key in KEYS)), None)


def _differs(key: str, got: Any, want: Any) -> str | None:
    if key in LISTS:
        same = isinstance(got, list | tuple) and list(got) == want
        return None if same else f"{key}: {want} was expected, a number for each rank; the plan says {_short(got)}."
    if isinstance(got, bool) or not isinstance(got, Real):
        return f"{key}: a number was expected; the plan says {_short(got)}."
    if close(got, want):
        return None
    said, right_one = told_apart(got, want)
    return f"{key}: {right_one} was expected, the plan says {said}."


def _raised(answer: Answer) -> str:
    return f"{answer.error}: {answer.message}" if answer.message else f"{answer.error}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


PLAN = Spec("16_project", "plan", 10, cases, MISTAKES, compare)
