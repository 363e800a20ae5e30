"""The log-log plot of `course bench ring`: bus bandwidth against size, a panel for each number of ranks."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from course_lib.collectives.bench_limits import LIMITS
from course_lib.collectives.bench_measure import CONTENDERS, GLOO, words
from course_lib.collectives.bench_rows import Row

# Okabe and Ito's colours, each with a mark of its own; gloo is black, limits are grey and broken.
_STYLES = {
    GLOO: {"color": "#222222", "marker": "s"},
    "ring, torch p2p": {"color": "#8F4A78", "marker": "v"},
    "ring, TCP": {"color": "#D55E00", "marker": "^"},
    "ring, shared": {"color": "#0072B2", "marker": "o"},
    "ring, zero-copy": {"color": "#009E73", "marker": "D"},
    "memcpy": {"color": "#777777", "ls": "--"},
    "loopback TCP": {"color": "#777777", "ls": ":"},
}


def plot(rows: Sequence[Row], path: Path, note: str) -> None:
    """Write the picture to `path`; `note` says where the numbers come from."""
    worlds = list(dict.fromkeys(row.ranks for row in rows))
    figure = Figure(figsize=(1 + 4.6 * len(worlds), 4.8), dpi=150, facecolor="white", layout="constrained")
    panels = figure.subplots(1, len(worlds), sharey=True, squeeze=False)[0]
    for axes, ranks in zip(panels, worlds, strict=True):
        for name in [*CONTENDERS, *LIMITS]:
            _line(axes, [row for row in rows if (row.ranks, row.name) == (ranks, name)], name)
        sizes = sorted({row.nbytes for row in rows})
        axes.set(xscale="log", yscale="log", title=f"{ranks} ranks", xlabel="size of the tensor")
        axes.set_xticks(sizes, [words(size) for size in sizes], rotation=45, ha="right", minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bus bandwidth, GB/s")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=2 + 2 * (len(worlds) > 1), frameon=False, fontsize=9
    )
    figure.suptitle(f"All-reduce within one host\n{note}", fontsize=10)
    figure.savefig(path)


def _line(axes: Axes, rows: Sequence[Row], name: str) -> None:
    if not rows:
        return
    sizes, style = [row.nbytes for row in rows], _STYLES[name]
    axes.plot(sizes, [row.bus_bandwidth for row in rows], label=name, lw=1.6, ms=4.5, **style)
    scale = [row.bus_bandwidth * row.seconds for row in rows]  # bandwidth of another time is this / that time
    low = [s / row.high for s, row in zip(scale, rows, strict=True)]
    high = [s / row.low for s, row in zip(scale, rows, strict=True)]
    axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, lw=0)
