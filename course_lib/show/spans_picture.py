"""A trace that is a list of spans, drawn: `show.spans([(rank, kind, start, end), ...])`."""

from collections.abc import Iterable

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.parallel.intervals import total
from course_lib.show.looks import LOOKS
from course_lib.show.picture import Picture, png_of

_WIDTH = 720  # pixels on the page; the file has twice as many
_KINDS = {  # the look, the hatching, and the row: computing above, what may lie behind it below
    "forward": ("forward", "", 0),
    "backward": ("backward", "", 0),
    "optimizer": ("optimizer", "", 0),
    "data": ("other", "////", 1),
    "communication": ("group", "", 2),
}
_ROW = 0.26  # of a lane


def spans(trace: Iterable[tuple[int, str, float, float]]) -> Picture:
    """Draw what each rank does: computing, below it data, below that communication.

    trace  (rank, kind, start, end) in microseconds; kinds are forward, backward, optimizer, data, communication

    Raises ValueError for an empty trace and for other kinds.
    """
    found = list(trace)
    if not found or any(kind not in _KINDS for _, kind, _, _ in found):
        raise ValueError(f"show.spans draws at least one span, of the kinds {', '.join(_KINDS)}.")
    ranks, begin = sorted({rank for rank, *_ in found}), min(start for _, _, start, _ in found)
    figure = Figure(figsize=(_WIDTH / 100, 0.9 + 0.62 * len(ranks)), dpi=200, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for kind, (look, hatch, row) in _KINDS.items():
        for lane, rank in enumerate(ranks):
            here = [(s, e) for r, k, s, e in found if (r, k) == (rank, kind)]
            bars = [((start - begin) / 1000, (end - start) / 1000) for start, end in here]
            style = {"facecolor": (LOOKS[look].light, 0.55), "edgecolor": LOOKS[look].light, "linewidth": 0.8}
            axes.broken_barh(bars, (lane - 0.4 + row * _ROW, _ROW * 0.9), hatch=hatch, **style)
    axes.set(xlabel="ms", yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    key = [
        Patch(facecolor=(LOOKS[look].light, 0.55), edgecolor=LOOKS[look].light, hatch=hatch, label=kind)
        for kind, (look, hatch, _) in _KINDS.items()
    ]
    figure.legend(handles=key, frameon=False, ncols=len(key), fontsize=9, loc="outside upper center")
    text = "\n".join(_in_words(found, rank) for rank in ranks)
    return Picture(png_of(figure), f"What each rank does, in ms. {text}", text, _WIDTH)


def _in_words(found: list[tuple[int, str, float, float]], rank: int) -> str:
    told = []
    for kind in _KINDS:
        here = [(start, end) for r, k, start, end in found if (r, k) == (rank, kind)]
        if here:
            told.append(f"{kind} {total(here) / 1000:.1f} ms")
    return f"rank {rank}: {', '.join(told)}"
