"""From measurements to alpha, beta and gamma: `fit(run(measure, ranks=4, watch=False).results)`.

Each size gives one point: the median over the rounds, where in each round the slowest rank counts. Through the points
(n, t) of the messages goes t = alpha + n * beta, through those of the sums t = c + n * gamma (c, the call, is left out:
microseconds). Both are least-squares lines for *relative* deviations, that is, the sum of ((line - t) / t)^2 is as
small as it can be; with absolute ones the largest message alone would settle everything. Negative values are no
costs: then the line is fitted again with that one fixed at 0. The residuals say how well a line describes it.

Hockney's model gives each pair of ranks a link of its own. Ranks that share the cores and the memory of one machine do
not have that: who copies the bytes is a core. So there is one line for each number of ranks that talk at once.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.collectives import cost
from course_lib.collectives.measure import ALGORITHMS, Samples

WORST = 0.25  # a point further than this from its line is worth a warning
_TALK = {"pair": "add", "pairs": "adds", "around": "adds"}  # the sums that belong to each way of talking


@dataclass(frozen=True, slots=True)
class Costs:
    """alpha (s), beta and gamma (s a byte), and for each size n: (n, measured seconds, line / measured - 1)."""

    alpha: float
    beta: float
    gamma: float
    points: tuple[tuple[int, float, float], ...]

    @property
    def worst(self) -> float:
        """The largest relative residual."""
        return max(abs(residual) for _, _, residual in self.points)


@dataclass(frozen=True, repr=False)
class Fit:
    """Lines for a pair alone, for all pairs at once and for the exchange around the ring; and what was measured."""

    ranks: int
    cores: int
    pair: Costs
    pairs: Costs
    around: Costs
    measured: dict[tuple[str, int], float]  # seconds of whole all-reduces, by algorithm and bytes

    def predict(self, algorithm: str, nbytes: int) -> float:
        """Seconds of an all-reduce, each message at the price of as many ranks as talk at once in that algorithm."""
        if algorithm == "tree":
            return self._tree(nbytes)
        costs = self.pair if algorithm == "naive" else self.around
        return cost.predict(algorithm, nbytes, self.ranks, costs.alpha, costs.beta, costs.gamma)

    def _tree(self, nbytes: int) -> float:
        """From level to level half as many pairs talk; in between, the price grows evenly with the pairs."""
        most, total = self.ranks // 2, 0.0
        for level in range(math.ceil(math.log2(self.ranks))):
            pairs = max(most >> level, 1)
            share = (pairs - 1) / (most - 1) if most > 1 else 0.0
            for costs, part in ((self.pair, 1 - share), (self.pairs, share)):
                total += part * cost.predict("tree", nbytes, 2, costs.alpha, costs.beta, costs.gamma)
        return total

    def compare(self) -> list[tuple[str, int, float, float, float]]:
        """(algorithm, bytes, predicted seconds, measured seconds, predicted / measured - 1), as it was measured."""
        rows = []
        for (algorithm, nbytes), measured in self.measured.items():
            predicted = self.predict(algorithm, nbytes)
            rows.append((algorithm, nbytes, predicted, measured, predicted / measured - 1))
        return rows

    @property
    def warning(self) -> str:
        """What the reader must know before trusting the lines; empty when all points are near them."""
        poor = [name for name in _TALK if getattr(self, name).worst > WORST]
        if not poor:
            return ""
        return (
            f"Warning: points are more than {WORST:.0%} off the line ({', '.join(poor)}). "
            "Is the machine busy? Then measure again; if it stays, one line is not enough for these sizes."
        )

    def __repr__(self) -> str:
        lines = [f"{self.ranks} ranks on {self.cores} cores{'':7}alpha     1/beta    1/gamma  worst residual"]
        for name, words in (("pair", "one pair"), ("pairs", "all pairs at once"), ("around", "around the ring")):
            c = getattr(self, name)
            lines.append(f"{words:<20}{c.alpha * 1e6:8.0f} µs {_rate(c.beta)} {_rate(c.gamma)} {c.worst:11.0%}")
        return "\n".join(lines + ([self.warning] if self.warning else []))


def fit(samples: Sequence[Samples]) -> Fit:
    """`samples`: what `measure` returned on each rank."""
    if not samples or not all(isinstance(one, Samples) for one in samples):
        raise TypeError(
            "fit wants what measure returned on each rank: fit(run(measure, ranks=4, watch=False).results)."
        )
    middle = {key: _median(samples, key) for key in samples[0].seconds}
    lines = {}
    for talk, sums in _TALK.items():
        alpha, beta, points = line({n: t for (name, n), t in middle.items() if name == talk})
        _, gamma, _ = line({n: t for (name, n), t in middle.items() if name == sums})
        lines[talk] = Costs(alpha, beta, gamma, points)
    whole = {key: seconds for key, seconds in middle.items() if key[0] in ALGORITHMS}
    return Fit(samples[0].ranks, samples[0].cores, **lines, measured=whole)


def line(points: dict[int, float]) -> tuple[float, float, tuple[tuple[int, float, float], ...]]:
    """(intercept, slope, (x, y, residual) for each): least squares of (intercept + slope * x) / y - 1, neither below 0.

    >>> intercept, slope, _ = line({0: 2.0, 10: 3.0, 20: 4.0})
    >>> round(intercept, 9), round(slope, 9)
    (2.0, 0.1)
    """
    if len(points) < 2 or min(points.values()) <= 0:
        raise ValueError(f"A line needs two sizes or more, each with a time above 0, not {points}.")
    # With u = 1/y and v = x/y, find a, b so that a*u + b*v is as near to 1 as can be.
    u, v = [1 / y for y in points.values()], [x / y for x, y in points.items()]
    uu, uv, vv = (sum(p * q for p, q in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    a, b = (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant
    if a < 0:
        a, b = 0.0, sum(v) / vv
    elif b < 0:
        a, b = sum(u) / uu, 0.0
    return a, b, tuple((x, y, (a + b * x) / y - 1) for x, y in points.items())


def _median(samples: Sequence[Samples], key: tuple[str, int]) -> float:
    return statistics.median(max(times) for times in zip(*(one.seconds[key] for one in samples), strict=True))


def _rate(seconds_a_byte: float) -> str:
    return f"{1e-9 / seconds_a_byte:6.2f} GB/s" if seconds_a_byte else "       free"
