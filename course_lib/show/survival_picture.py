"""A run that was killed and one that was left alone, on each other: `show.survived(calm, hurt)`."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from course_lib.show.picture import Picture, png_of
from course_lib.train.record import TrainRun

_WIDTH = 720  # pixels on the page; the file has twice as many
_CALM, _HURT, _MARK = "#56B4E9", "#D55E00", "#222222"


def survived(calm: TrainRun, hurt: TrainRun, labels: Sequence[str] = ("left alone", "killed")) -> Picture:
    """The training loss of both against the step, the restarts, and below the difference of the losses.

    Raises ValueError when they have no step in common.
    """
    one, other = (dict(zip(run.steps, run.losses, strict=True)) for run in (calm, hurt))
    steps = sorted(one.keys() & other.keys())
    if not steps:
        raise ValueError("show.survived needs two runs with steps in common.")
    gaps = [other[step] - one[step] for step in steps]
    equal = sum(one[step] == other[step] for step in steps)
    restarts = [row["step"] for row in hurt.rows("start")][1:]
    figure = Figure(figsize=(_WIDTH / 100, 4.6), dpi=200, facecolor="white", layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=[4, 1])
    top.plot(calm.steps, calm.losses, color=_CALM, lw=5, label=labels[0])
    top.plot(hurt.steps, hurt.losses, color=_HURT, lw=1.2, label=labels[1])
    for k, step in enumerate(restarts):
        top.axvline(step, color=_MARK, lw=1, ls=":", label="" if k else "went on from this checkpoint")
    if min(one.values()) > 0 and max(one.values()) > 10 * min(one.values()):
        top.set_yscale("log")
    bottom.plot(steps, gaps, color=_HURT, lw=1.2)
    if not any(gaps):
        bottom.set(ylim=(-1, 1), yticks=[0])
    top.set_ylabel("training loss (nats)")
    bottom.set(xlabel="optimizer step", ylabel="difference")
    for panel in (top, bottom):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    top.legend(frameon=False, fontsize=9)
    largest = max((abs(gap) for gap in gaps if math.isfinite(gap)), default=0.0)
    text = f"{equal} of {len(steps)} losses have the same bits; the largest difference is {largest:g}"
    went = f", went on after step {', '.join(map(str, restarts))}" if restarts else ""
    figure.suptitle(text, fontsize=11)
    return Picture(png_of(figure), f"Two loss curves{went}. {text}.", f"{text}{went}", _WIDTH)
