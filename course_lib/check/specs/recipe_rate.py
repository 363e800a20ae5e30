"""Exercise 09, first part: the learning rate of a step. Judged by its value, against another form of the formula."""

import math
import random

from course_lib.check.findings import told_apart
from course_lib.check.spec import Answer, Case, Spec
from course_lib.check.specs.recipe_rate_mistakes import MISTAKES, close

NAMES = ("step", "total", "warmup", "base", "reference", "batch", "ranks", "optimizer")


def right(
    step: int, total: int, warmup: int, base: float, reference: int, batch: int, ranks: int, optimizer: str
) -> float:
    """0.5 * (1 + cos(x)) is cos(x / 2) squared; the ratio's exponent is 1 or 1/2."""
    peak = base * math.exp(math.log(batch * ranks / reference) * (1 if optimizer == "sgd" else 0.5))
    if step <= warmup:
        return peak / warmup * step
    first = warmup or 1  # the step at which the curve is at its top
    return peak * math.cos(math.pi / 2 * (step - first) / (total - first + 1)) ** 2


def _run(rng: random.Random, optimizer: str) -> dict:
    """A run that tells wrong ratios apart: batch < reference < batch * ranks, and the last is no multiple."""
    reference, ranks = rng.choice([64, 128, 256]), rng.choice([3, 5, 6, 7])
    batch = rng.randint(reference * 7 // 10, reference * 9 // 10) | 1
    total, warmup = rng.randint(80, 400), rng.randint(10, 30)
    base = round(rng.uniform(0.05, 0.4), 3)
    values = (0, total, warmup, base, reference, batch, ranks, optimizer)
    return dict(zip(NAMES, values, strict=True))


def _case(group: str, values: dict) -> Case:
    inputs = tuple(values[name] for name in NAMES)
    story = f"learning_rate({', '.join(f'{name}={values[name]!r}' for name in NAMES)})"
    return Case(group, story, inputs, right(*inputs))


def cases(rng: random.Random) -> list[Case]:
    """Both optimizers at steps of all parts of a run, and runs at the edges."""
    found = []
    for optimizer in ("sgd", "adamw"):
        run = _run(rng, optimizer)
        total, warmup = run["total"], run["warmup"]
        # First where most mistakes differ from each other.
        steps = [rng.randint(warmup + 10, total - 10), total, warmup + 1, rng.randint(5, warmup - 2), 1, warmup]
        found += [_case(f"{optimizer}: warm-up, peak, cosine", run | {"step": step}) for step in steps]
    run = _run(rng, "sgd")
    edges = [{"warmup": 0, "step": 1}, {"warmup": 0, "step": 2}, {"warmup": 0, "step": 1, "total": 1}]
    edges += [{"warmup": run["total"], "step": run["total"]}, {"batch": run["reference"] // 2, "ranks": 1, "step": 50}]
    return found + [_case("no warm-up, one step, all warm-up, a batch below the reference", run | e) for e in edges]


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs."""
    if answer.error:
        said = f": {answer.message}" if answer.message else ""
        return f"the function raised {answer.error}{said}."
    if isinstance(answer.value, bool) or not isinstance(answer.value, int | float):
        return f"a rate was expected, a float; the function returned {answer.value!r:.60}."
    if not close(answer.value, case.expected):
        got, want = told_apart(float(answer.value), case.expected)
        return f"{want} was expected, the function returned {got}."
    return None


SPEC = Spec("09_recipe", "learning_rate", 5, cases, MISTAKES, compare)
