"""Time over size for several algorithms, which one is the fastest where, and the lines on the axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from course_lib.show import words

# Okabe and Ito's colours, each with a line style of its own.
STYLES = {
    "naive": ("#8F4A78", ":"),
    "tree": ("#009E73", "-."),
    "halving": ("#222222", (0, (5, 1, 1, 1, 1, 1))),
    "ring": ("#0072B2", "-"),
    "hierarchical": ("#D55E00", "--"),
}
_POINTS = 120  # sizes that are computed for each line


@dataclass(frozen=True)
class Curves:
    """`seconds[name][k]` is the time for `sizes[k]` bytes; `best` lists (from bytes, name of the fastest there)."""

    sizes: list[float]
    seconds: dict[str, list[float]]
    best: list[tuple[float, str]]

    def words(self) -> str:
        """Which is the fastest where, as a sentence."""
        parts = []
        for k, (start, name) in enumerate(self.best):
            begin = f" from {words.size(round(start))}" if k else ""
            end = f" up to {words.size(round(self.best[k + 1][0]))}" if k + 1 < len(self.best) else ""
            parts.append(f"{name}{begin}{end}")
        return f"Fastest between {words.size(round(self.sizes[0]))} and {words.size(round(self.sizes[-1]))}: " + (
            "; ".join(parts) + "."
        )


def curves(seconds: Callable[[str, float], float], names: Sequence[str], low: float, high: float) -> Curves:
    """`seconds(name, nbytes)` for sizes from `low` to `high` bytes; equal times go to the first of `names`."""
    sizes = np.geomspace(low, high, _POINTS).tolist()
    table = {name: [seconds(name, size) for size in sizes] for name in names}

    def fastest(size: float) -> str:
        return min(names, key=lambda name: seconds(name, size))

    best = [(sizes[0], fastest(sizes[0]))]
    for left, right in pairwise(sizes):
        if fastest(right) != best[-1][1]:
            best.append((_change(fastest, left, right), fastest(right)))
    return Curves(sizes, table, best)


def _change(fastest: Callable[[float], str], left: float, right: float) -> float:
    """Where the fastest of `left` stops to be it, to a thousandth."""
    before = fastest(left)
    while right / left > 1.001:
        middle = (left * right) ** 0.5
        left, right = (middle, right) if fastest(middle) == before else (left, middle)
    return right


def draw(
    axes: Axes,
    found: Curves,
    measured: dict[tuple[str, int], float] | None = None,
    limits: tuple[float, float] | None = None,
) -> None:
    """The lines, the crossovers as dots with their sizes, and `measured` seconds as circles. `limits`: of the time."""
    for name, seconds in found.seconds.items():
        colour, dash = STYLES[name]
        axes.plot(found.sizes, seconds, ls=dash, color=colour, lw=2, label=name)
    for (name, nbytes), seconds in (measured or {}).items():
        if name in found.seconds:
            axes.plot(nbytes, seconds, "o", mfc="white", mec=STYLES[name][0], mew=1.6, ms=6, zorder=4)
    if measured:
        axes.plot([], [], "o", mfc="white", mec="#444444", mew=1.6, ms=6, label="measured")
    axes.set(xscale="log", yscale="log", xlim=(found.sizes[0], found.sizes[-1]))
    _mark(axes, found, limits)
    axes.set(xlabel="size of the tensor on each rank", ylabel="time of one all-reduce")
    for axis, form in ((axes.xaxis, lambda v, _: words.size(round(v))), (axes.yaxis, lambda v, _: words.duration(v))):
        axis.set_major_locator(LogLocator(10, numticks=12))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(form))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, 0.93))


def _mark(axes: Axes, found: Curves, limits: tuple[float, float] | None) -> None:
    """A dot where another one becomes the fastest, and above the lines the name of the fastest."""
    edges = [start for start, _ in found.best] + [found.sizes[-1]]
    low, high = limits or axes.get_ylim()
    axes.set_ylim(low, high if limits else high * (high / low) ** 0.12)  # room for the names
    across = np.log10(found.sizes[-1] / found.sizes[0])
    for (start, name), end in zip(found.best, edges[1:], strict=True):
        if start > found.sizes[0]:
            at = float(np.interp(np.log(start), np.log(found.sizes), found.seconds[name]))
            axes.plot([start, start], [low, at], ls=":", color="#666666", lw=1)
            axes.plot(start, at, "o", color="#222222", ms=5, zorder=5)
            axes.annotate(words.size(round(start)), (start, low), (4, 4), textcoords="offset points", fontsize=9)
        if np.log10(end / start) > 0.16 * across:
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": 9}
            axes.text((start * end) ** 0.5, 0.995, f"{name} is fastest", color=STYLES[name][0], weight="bold", **place)
        if start > found.sizes[0]:
            axes.axvline(start, 0.93, 1, color="#666666", lw=1, ls=":")
