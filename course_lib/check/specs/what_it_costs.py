"""Exercise 04: the cost of an all-reduce by three algorithms (SPEC), and which one to choose (CHOOSE).

The oracle adds up messages step by step, as the algorithms send them; it uses no closed formula.
"""

import random
from collections.abc import Sequence

from course_lib.check.findings import told_apart
from course_lib.check.spec import Answer, Case, Spec
from course_lib.check.specs.what_it_costs_mistakes import CHOICES, FORMULAS, close

ALGORITHMS = ("naive", "tree", "ring")
NEAR = 1.03  # how far the sizes of CHOOSE are from a crossover
TELLING = (18, 20, 36, 40, 48)  # ranks for which log2 rounded up, rounded down, not rounded, and ln all differ


def right(algorithm: str, nbytes: int, ranks: int, alpha: float, beta: float, gamma: float) -> float:
    """Seconds on the chain that takes longest, message by message."""
    message, add = alpha + nbytes * beta, nbytes * gamma
    total = 0.0
    if algorithm == "naive":
        for _ in range(ranks - 1):
            total += message + add  # one rank's tensor to the root, which adds it
            total += message  # the result to that rank
    elif algorithm == "tree":
        reached = 1
        while reached < ranks:  # a level up and a level down
            total += message + add + message
            reached *= 2
    else:
        for _ in range(ranks - 1):
            total += alpha + nbytes / ranks * beta + nbytes / ranks * gamma  # reduce-scatter
            total += alpha + nbytes / ranks * beta  # all-gather
    return total


def _machine(rng: random.Random) -> tuple[float, float, float]:
    """alpha (s), beta (s/B), gamma (s/B) of some machine, three digits each."""
    exponents = rng.uniform(-6, -4), rng.uniform(-10, -8.5), rng.uniform(-11, -9.5)
    return tuple(float(f"{10**exponent:.2e}") for exponent in exponents)


def _story(nbytes: int, ranks: int, alpha: float, beta: float, gamma: float) -> str:
    return f"{nbytes:,} bytes, {ranks} rank{'s' * (ranks > 1)}, alpha={alpha:g}, beta={beta:g}, gamma={gamma:g}"


def _case(algorithm: str, group: str, ranks: int, rng: random.Random) -> Case:
    machine = _machine(rng)
    nbytes = 8 * ranks * rng.randint(100, 1_000_000)  # comes out even in each way of cutting it
    inputs = (algorithm, nbytes, ranks, *machine)
    return Case(group, f"cost('{algorithm}'): {_story(*inputs[1:])}", inputs, right(*inputs))


def cases(rng: random.Random) -> list[Case]:
    """Each algorithm with a number of ranks that is no power of two, with one that is, and with two ranks."""
    found = []
    for algorithm in ALGORITHMS:
        counts = (rng.choice(TELLING), rng.choice([4, 8, 16, 64]), 2)
        found += [_case(algorithm, f"{algorithm}: messages, bytes and sums", ranks, rng) for ranks in counts]
    found += [_case(algorithm, "one rank sends nothing", 1, rng) for algorithm in ALGORITHMS]
    inputs = ("star", 1000, 4, *_machine(rng))
    found.append(Case("an algorithm that it does not know", "cost('star'): there is no such one", inputs, ValueError))
    return found


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs."""
    if case.expected is ValueError:
        if "ValueError" in answer.kinds:
            return None
        got = f"raised {_raised(answer)}" if answer.error else f"returned {_shown(answer.value)}"
        return f"a ValueError was expected, the function {got}."
    if answer.error:
        return f"the function raised {_raised(answer)}."
    if isinstance(answer.value, bool) or not isinstance(answer.value, int | float):
        return f"seconds were expected, a float; the function returned {_shown(answer.value)}."
    if not close(answer.value, case.expected):
        got, want = told_apart(answer.value, case.expected)
        return f"{want} s was expected, the function returned {got}."
    return None


def choices(rng: random.Random) -> list[Case]:
    """Sizes below and above the crossover of each of some machines: first far from it, then near; and the edges.

    So near that whoever forgets a term of a price, or rounds log2 in another way, is on the wrong side.
    """
    machines = []
    for ranks in (rng.choice([8, 16]), rng.choice(TELLING), 64, 4):
        alpha, beta, _ = _machine(rng)
        # the sums matter, and the crossover is at many bytes
        machines.append((ranks, 10 * alpha, beta, float(f"{beta * rng.uniform(0.4, 1):.2e}")))
    found = []
    for factor, how in ((rng.uniform(2, 4), ""), (NEAR, "just ")):
        for ranks, *machine in machines:
            edge = _crossover(ranks, *machine)
            found.append(_choice(f"{how}below the crossover", round(edge / factor), ranks, machine))
            found.append(_choice(f"{how}above it", round(edge * factor), ranks, machine))
    for ranks in (2, 3):
        found.append(_choice("two and three ranks", 4 * rng.randint(100_000, 1_000_000), ranks, _machine(rng)))
    return found


def _choice(group: str, nbytes: int, ranks: int, machine: Sequence[float]) -> Case:
    inputs = (nbytes, ranks, *machine)
    best = min(ALGORITHMS, key=lambda name: right(name, *inputs))
    return Case(group, f"choose: {_story(*inputs)}", inputs, best)


def _crossover(ranks: int, alpha: float, beta: float, gamma: float) -> float:
    """Bytes at which tree and ring cost the same: both are straight lines in the size."""
    tree0, tree1 = (right("tree", nbytes, ranks, alpha, beta, gamma) for nbytes in (0, 1))
    ring0, ring1 = (right("ring", nbytes, ranks, alpha, beta, gamma) for nbytes in (0, 1))
    return (ring0 - tree0) / ((tree1 - tree0) - (ring1 - ring0))


def compare_choice(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs."""
    if answer.error:
        return f"the function raised {_raised(answer)}."
    if not isinstance(answer.value, str) or answer.value not in ALGORITHMS:
        return f"'naive', 'tree' or 'ring' was expected; the function returned {_shown(answer.value)}."
    if answer.value == case.expected:
        return None
    times = {name: right(name, *case.inputs) for name in (case.expected, answer.value)}
    told = ", ".join(f"{name} takes {seconds:.3g} s" for name, seconds in times.items())
    return f"'{case.expected}' is the fastest, the function returned '{answer.value}': {told}."


def _raised(answer: Answer) -> str:
    return f"{answer.error}: {answer.message}" if answer.message else f"{answer.error}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


SPEC = Spec("04_what_it_costs", "cost", 6, cases, FORMULAS, compare)
CHOOSE = Spec("04_what_it_costs", "choose", 4, choices, CHOICES, compare_choice)
