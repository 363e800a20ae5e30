"""Wrong and right answers to exercise 04. The name of a wrong answer is the verdict that it must get."""

import math
import os

import torch


def _cost(algorithm, nbytes, ranks, alpha, beta, gamma):
    message, add = alpha + nbytes * beta, nbytes * gamma
    if algorithm == "naive":
        return (ranks - 1) * (2 * message + add)
    if algorithm == "tree":
        return math.ceil(math.log2(ranks)) * (2 * message + add)
    if algorithm == "ring":
        chunk = nbytes / ranks
        return 2 * (ranks - 1) * (alpha + chunk * beta) + (ranks - 1) * chunk * gamma
    raise ValueError(f"no algorithm {algorithm!r}")


def _instead(algorithm, formula):
    """The right answer, but for one algorithm."""

    def cost(name, nbytes, ranks, alpha, beta, gamma):
        if name == algorithm and ranks > 1:
            return formula(nbytes, ranks, alpha, beta, gamma)
        return _cost(name, nbytes, ranks, alpha, beta, gamma)

    return cost


def _levels(levels):
    return _instead("tree", lambda n, r, a, b, g: levels(r) * (2 * (a + n * b) + n * g))


def _one_rank(algorithm, nbytes, ranks, alpha, beta, gamma):
    if algorithm == "tree":
        return 1 / (ranks - 1) * (ranks - 1) * _cost(algorithm, nbytes, ranks, alpha, beta, gamma)
    return _cost(algorithm, nbytes, ranks, alpha, beta, gamma)


def _no_check(algorithm, *machine):
    return _cost(algorithm if algorithm in ("naive", "tree") else "ring", *machine)


def _nothing(algorithm, nbytes, ranks, alpha, beta, gamma):
    _cost(algorithm, nbytes, ranks, alpha, beta, gamma)


def _stub(*inputs):
    raise NotImplementedError


def _leaves(*inputs):
    os._exit(0)


WRONG = {
    "megabytes": lambda k, n, r, a, b, g: _cost(k, n / 1e6, r, a, b, g),
    "bits": lambda k, n, r, a, b, g: _cost(k, n * 8, r, a, b, g),
    "no_gamma": lambda k, n, r, a, b, g: _cost(k, n, r, a, b, 0),
    "gamma_both_ways": lambda k, n, r, a, b, g: _cost(k, n, r, a, b, 2 * g),
    "latency_once": lambda k, n, r, a, b, g: (r > 1) * a + _cost(k, n, r, 0, b, g),
    "one_way": lambda k, n, r, a, b, g: _cost(k, n, r, a / 2, b / 2, g),
    "all_ranks_together": lambda *inputs: inputs[2] * _cost(*inputs),
    "naive_at_once": _instead("naive", lambda n, r, a, b, g: 2 * (a + n * b) + (r - 1) * n * g),
    "naive_n": _instead("naive", lambda n, r, a, b, g: r * (a + n * b + n * g) + r * (a + n * b)),
    "tree_not_rounded": _levels(math.log2),
    "tree_rounded_down": _levels(lambda r: math.floor(math.log2(r))),
    "tree_bit_length": _levels(int.bit_length),
    "tree_natural_log": _levels(lambda r: math.ceil(math.log(r))),
    "tree_linear": _levels(lambda r: r - 1),
    "tree_chunks": _instead("tree", lambda n, r, a, b, g: _cost("tree", n / r, r, a, b, g)),
    "ring_whole_tensor": _instead("ring", lambda n, r, a, b, g: (r - 1) * (2 * a + 2 * n * b + n * g)),
    "ring_n_steps": _instead("ring", lambda n, r, a, b, g: 2 * r * (a + n / r * b) + r * n / r * g),
    "ring_two_tensors": _instead("ring", lambda n, r, a, b, g: 2 * (r - 1) * a + 2 * n * b + n * (r - 1) / r * g),
    "ring_gamma_whole": _instead("ring", lambda n, r, a, b, g: 2 * (r - 1) * (a + n / r * b) + n * g),
    "ring_latency_per_phase": _instead("ring", lambda n, r, a, b, g: 2 * a + (r - 1) * n / r * (2 * b + g)),
    "ring_log": _instead("ring", lambda n, r, a, b, g: 2 * math.ceil(math.log2(r)) * a + (r - 1) * n / r * (2 * b + g)),
    "one_rank": _one_rank,
    "no_check": _no_check,
    "nothing": _nothing,
    "stub": _stub,
    "no_answer": _leaves,
}
UNNAMED = {
    "a text": lambda *inputs: "1 ms",
    "a tensor": lambda *inputs: torch.tensor(_cost(*inputs)),
    "True": lambda *inputs: True,
    "a tenth off": lambda *inputs: 1.1 * _cost(*inputs),
    "not a number": lambda *inputs: float("nan"),
    "crashes": lambda *inputs: inputs[99],
    "swaps beta and gamma": lambda k, n, r, a, b, g: _cost(k, n, r, a, g, b),
}


def _by_table(algorithm, nbytes, ranks, alpha, beta, gamma):
    levels = (ranks - 1).bit_length()
    table = {
        "naive": (2 * (ranks - 1), 2 * (ranks - 1), ranks - 1),
        "tree": (2 * levels, 2 * levels, levels),
        "ring": (2 * (ranks - 1), 2 - 2 / ranks, 1 - 1 / ranks),
    }
    if algorithm not in table:
        raise ValueError(algorithm)
    return sum(k * price for k, price in zip(table[algorithm], (alpha, nbytes * beta, nbytes * gamma), strict=True))


def _by_loops(algorithm, nbytes, ranks, alpha, beta, gamma):
    if algorithm not in ("naive", "tree", "ring"):
        raise ValueError("unknown")
    piece = nbytes // ranks if algorithm == "ring" else nbytes
    steps = ranks - 1
    if algorithm == "tree":
        steps, reached = 0, 1
        while reached < ranks:
            steps, reached = steps + 1, reached + reached
    seconds = 0
    for _ in range(steps):
        seconds += alpha + piece * beta + piece * gamma
    for _ in range(steps):
        seconds += alpha + piece * beta
    return seconds


def _by_recursion(algorithm, nbytes, ranks, alpha, beta, gamma):
    there, back = alpha + nbytes * (beta + gamma), alpha + nbytes * beta
    match algorithm:
        case "naive":
            return 0 if ranks == 1 else there + back + _by_recursion("naive", nbytes, ranks - 1, alpha, beta, gamma)
        case "tree":
            half = (ranks + 1) // 2
            return 0.0 if ranks == 1 else there + back + _by_recursion("tree", nbytes, half, alpha, beta, gamma)
        case "ring":
            return _by_recursion("naive", nbytes / ranks, ranks, alpha, beta, gamma)
        case _:
            raise ValueError(f"{algorithm} is unknown")


RIGHT = {"as the solution": _cost, "table": _by_table, "loops": _by_loops, "recursive": _by_recursion}

_NAMES = ("naive", "tree", "ring")


def _choose(nbytes, ranks, alpha, beta, gamma):
    return min(_NAMES, key=lambda name: _cost(name, nbytes, ranks, alpha, beta, gamma))


WRONG_CHOICE = {
    "not_a_name": lambda *inputs: min(_cost(name, *inputs) for name in _NAMES),
    "the_slowest": lambda *inputs: max(_NAMES, key=lambda name: _cost(name, *inputs)),
    "bandwidth_only": lambda n, r, a, b, g: min(_NAMES, key=lambda name: _cost(name, n, r, 0, b, g)),
    "latency_only": lambda n, r, a, b, g: min(("tree", "ring"), key=lambda name: _cost(name, 0, r, a, b, g)),
    "stub": _stub,
}
UNNAMED_CHOICE = {
    "a fixed limit": lambda n, *machine: "ring" if n > 1e6 else "tree",
    "another name": lambda *inputs: "star",
    "crashes": lambda *inputs: {}["ring"],
}


def _sorted(nbytes, ranks, alpha, beta, gamma):
    return sorted((_by_table(name, nbytes, ranks, alpha, beta, gamma), name) for name in _NAMES)[0][1]


def _by_crossover(nbytes, ranks, alpha, beta, gamma):
    levels = (ranks - 1).bit_length()
    saved = nbytes * (2 * beta + gamma) * (levels - (ranks - 1) / ranks)
    return "ring" if saved > 2 * (ranks - 1 - levels) * alpha else "tree"


def _cheap(wrong):
    """choose with prices of its own: wrong(name, nbytes, ranks, alpha, beta, gamma)"""
    return lambda *inputs: min(_NAMES, key=lambda name: wrong(name, *inputs))


def _with_levels(levels):
    def price(name, n, r, a, b, g):
        return levels(r) * (2 * a + 2 * n * b + n * g) if name == "tree" else _cost(name, n, r, a, b, g)

    return _cheap(price)


# What choose does when it makes up its own prices, each with one fault. All must be refused, whatever they are called.
ALMOST_CHOICE = {
    "no sums": _cheap(lambda k, n, r, a, b, g: _cost(k, n, r, a, b, 0)),
    "sums twice": _cheap(lambda k, n, r, a, b, g: _cost(k, n, r, a, b, 2 * g)),
    "one way": _cheap(lambda k, n, r, a, b, g: _cost(k, n, r, a / 2, b / 2, g)),
    "sums and bytes exchanged": _cheap(lambda k, n, r, a, b, g: _cost(k, n, r, a, g, b)),
    "log2 not rounded": _with_levels(math.log2),
    "log2 rounded down": _with_levels(lambda r: int(math.log2(r))),
    "natural logarithm": _with_levels(lambda r: math.ceil(math.log(r))),
    "a level too many": _with_levels(lambda r: r.bit_length()),
}
WRONG_CHOICE["own_prices"] = ALMOST_CHOICE["no sums"]


class _Unknown(ValueError):
    """A learner's own exception is a ValueError, too."""


def _own_error(algorithm, *rest):
    if algorithm not in _NAMES:
        raise _Unknown(algorithm)
    return _cost(algorithm, *rest)


RIGHT["own error"] = _own_error
RIGHT_CHOICE = {"as the solution": _choose, "sorted": _sorted, "by the crossover": _by_crossover}
