"""What people get wrong in exercise 04. A wrong formula is recognised by its value: nobody hits that by chance."""

import math
from collections.abc import Callable

from course_lib.check.spec import Answer, Case, Mistake

Formula = Callable[[float, int, float, float, float], float]


def close(got: float, want: float) -> bool:
    """Equal but for rounding."""
    return math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-18)


def _total(messages: float, volume: float, sums: float) -> Formula:
    return lambda n, _, a, b, g: messages * a + volume * n * b + sums * n * g


def _log(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def naive(n, ranks, a, b, g):
    return _total(2 * (ranks - 1), 2 * (ranks - 1), ranks - 1)(n, ranks, a, b, g)


def tree(n, ranks, a, b, g):
    return _total(2 * _log(ranks), 2 * _log(ranks), _log(ranks))(n, ranks, a, b, g)


def ring(n, ranks, a, b, g):
    return _total(2 * (ranks - 1), 2 * (ranks - 1) / ranks, (ranks - 1) / ranks)(n, ranks, a, b, g)


RIGHT: dict[str, Formula] = {"naive": naive, "tree": tree, "ring": ring}


def _both(algorithm: str, n: float, ranks: int, a: float, b: float, g: float) -> float:
    once = RIGHT[algorithm](n, ranks, 0, 0, g)
    return RIGHT[algorithm](n, ranks, a, b, g) + once


def _levels(levels: Callable[[int], float]) -> Formula:
    return lambda n, ranks, a, b, g: levels(ranks) * (2 * a + 2 * n * b + n * g)


def _natural(ranks: int) -> int:
    return math.ceil(math.log(ranks))


# name, algorithms, the wrong formula (algorithm, n, ranks, alpha, beta, gamma), what to say
_ANY = tuple(RIGHT)
_WRONG: list[tuple[str, tuple[str, ...], Callable[..., float], str]] = [
    (
        "megabytes", _ANY, lambda k, n, r, a, b, g: RIGHT[k](n / 1e6, r, a, b, g),
        "beta and gamma are seconds a *byte*, and nbytes is in bytes: do not divide by a million.",
    ),
    (
        "bits", _ANY, lambda k, n, r, a, b, g: RIGHT[k](8 * n, r, a, b, g),
        "beta is seconds a byte, not a bit: there is nothing to multiply by 8.",
    ),
    (
        "no_gamma", _ANY, lambda k, n, r, a, b, g: RIGHT[k](n, r, a, b, 0),
        "The sums are missing: whoever receives something to add needs gamma seconds for each byte of it.",
    ),
    (
        "gamma_both_ways", _ANY, lambda k, n, r, a, b, g: _both(k, n, r, a, b, g),
        "The sums are counted twice. Only what travels on its way to a sum is added; the finished result is copied.",
    ),
    (
        "latency_once", _ANY, lambda k, n, r, a, b, g: a + RIGHT[k](n, r, 0, b, g),
        "alpha is there only once. Every message costs it again, so count the messages that come one after the other.",
    ),
    (
        "one_way", _ANY, lambda k, n, r, a, b, g: RIGHT[k](n, r, a / 2, b / 2, g),
        "Only one half is there: the sum is made, but the result must come back to all ranks, with as many messages.",
    ),
    (
        "all_ranks_together", _ANY, lambda k, n, r, a, b, g: r * RIGHT[k](n, r, a, b, g),
        "This adds up the time of all ranks. They work at the same time: ask how long the slowest one needs.",
    ),
    (
        "naive_at_once", ("naive",), lambda k, n, r, a, b, g: 2 * (a + n * b) + (r - 1) * n * g,
        "The root cannot receive from all at once: its link carries one message at a time, so N - 1 of them queue up.",
    ),
    (
        "naive_n", ("naive",), lambda k, n, r, a, b, g: r * (2 * a + 2 * n * b + n * g),
        "The root sends nothing to itself: N - 1 tensors come in and N - 1 go out, not N.",
    ),
    (
        "tree_not_rounded", ("tree",), lambda k, n, r, a, b, g: _levels(math.log2)(n, r, a, b, g),
        "There is no half level in a tree. With 5 ranks, log2 is 2.32, and 3 levels are needed: round up.",
    ),
    (
        "tree_rounded_down", ("tree",), lambda k, n, r, a, b, g: _levels(lambda s: int(math.log2(s)))(n, r, a, b, g),
        "The number of levels is rounded down: two levels reach 4 ranks only, the fifth one needs a third. Round up.",
    ),
    (
        "tree_bit_length", ("tree",), lambda k, n, r, a, b, g: _levels(lambda s: s.bit_length())(n, r, a, b, g),
        "One level too many when the number of ranks is a power of two: 8 ranks need 3 levels, and (8).bit_length() "
        "is 4.",
    ),
    (
        "tree_natural_log", ("tree",), lambda k, n, r, a, b, g: _levels(_natural)(n, r, a, b, g),
        "math.log is the natural logarithm. The ranks that are reached double from level to level: that is math.log2.",
    ),
    (
        "tree_linear", ("tree",), lambda k, n, r, a, b, g: _levels(lambda s: s - 1)(n, r, a, b, g),
        "That is the time of the naive way. In a tree, many pairs talk at the same time: it has log2 N levels.",
    ),
    (
        "tree_chunks", ("tree",), lambda k, n, r, a, b, g: tree(n / r, r, a, b, g),
        "A tree does not cut the tensor: each message carries all nbytes. It is the ring that sends chunks.",
    ),
    (
        "ring_whole_tensor", ("ring",), lambda k, n, r, a, b, g: naive(n, r, a, b, g),
        "In each step a rank sends one chunk, 1/N of the tensor, not all of it. That is what the ring is for.",
    ),
    (
        "ring_n_steps", ("ring",), lambda k, n, r, a, b, g: 2 * r * (a + n / r * b) + n * g,
        "Each phase has N - 1 steps, not N: a chunk begins on a rank that need not send it to itself.",
    ),
    (
        "ring_two_tensors", ("ring",), lambda k, n, r, a, b, g: 2 * (r - 1) * a + 2 * n * b + (r - 1) / r * n * g,
        "The volume comes near to 2 * nbytes with many ranks only. It is 2 (N - 1) / N * nbytes: half of it with 2.",
    ),
    (
        "ring_gamma_whole", ("ring",), lambda k, n, r, a, b, g: ring(n, r, a, b, 0) + n * g,
        "A rank adds N - 1 chunks, not N: its own values are there already. So (N - 1) / N * nbytes are added.",
    ),
    (
        "ring_latency_per_phase", ("ring",), lambda k, n, r, a, b, g: 2 * a + ring(n, r, 0, b, g),
        "alpha is there once for each phase. Every step sends a message, so it must be there once for each step.",
    ),
    (
        "ring_log", ("ring",), lambda k, n, r, a, b, g: 2 * _log(r) * a + ring(n, r, 0, b, g),
        "A ring has 2 (N - 1) steps, one after the other; log2 N steps are those of a tree or of halving.",
    ),
]  # fmt: skip


def _is(name: str, algorithms: tuple[str, ...], formula: Callable[..., float], says: str) -> Mistake:
    def fits(case: Case, answer: Answer) -> bool:
        if case.inputs[0] not in algorithms or not isinstance(answer.value, int | float):
            return False
        wrong = formula(*case.inputs)
        return not close(wrong, case.expected) and close(answer.value, wrong)

    return Mistake(name, fits, says)


FORMULAS = (
    Mistake(
        "one_rank",
        lambda case, answer: case.inputs[2] == 1 and case.expected == 0,
        "One rank alone has nobody to send to: 0 seconds, and no error. The course's loops run on one rank, too.",
    ),
    *(_is(*row) for row in _WRONG),
    Mistake(
        "no_check",
        lambda case, answer: case.expected is ValueError,
        "Whoever mistypes a name must be told, not given some price or some other exception: raise a ValueError that "
        "names it.",
    ),
    Mistake(
        "nothing",
        lambda case, answer: answer.error is None and answer.value is None,
        "The function came to its end without `return`.",
    ),
)


def _slowest(*inputs: float) -> str:
    return max(RIGHT, key=lambda name: RIGHT[name](*inputs))


def _chooses(name: str, wrong: Callable[..., str], says: str) -> Mistake:
    """Fits when `wrong` gives that answer here, and not for a size just beside the crossover, where much fits."""

    def fits(case: Case, answer: Answer) -> bool:
        return (
            not case.group.startswith("just") and answer.value != case.expected and answer.value == wrong(*case.inputs)
        )

    return Mistake(name, fits, says)


CHOICES = (
    Mistake(
        "not_a_name",
        lambda case, answer: answer.error is None and not isinstance(answer.value, str),
        "Return the name of the algorithm: min(names, key=...) gives the name, min(times) only its time.",
    ),
    _chooses(
        "the_slowest",
        _slowest,
        "That is the slowest of the three: take the one whose time is the smallest.",
    ),
    _chooses(
        "bandwidth_only",
        lambda *inputs: "ring",
        "By bytes alone the ring always wins. For a tensor as small as this its 2 (N - 1) latencies weigh more than "
        "the bytes that it saves: compare whole times.",
    ),
    _chooses(
        "latency_only",
        lambda *inputs: "tree",
        "By the number of messages the tree wins from 4 ranks on. For a tensor as large as this the bytes weigh more: "
        "compare whole times.",
    ),
    Mistake(
        "own_prices",
        lambda case, answer: isinstance(answer.value, str) and answer.value in RIGHT,
        "The times are close here, so a price that is a little wrong gives the wrong name: each of alpha, beta and "
        "gamma counts, and log2 is rounded up. Let choose call your cost, once that has passed its check.",
    ),
)
