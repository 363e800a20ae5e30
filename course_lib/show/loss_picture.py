"""The training loss of one or several runs: `show.loss(t)`."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.show.picture import Picture, png_of
from course_lib.train.record import TrainRun

# Okabe and Ito's colours, those that stand out on white, each with a line style of its own.
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#8F4A78", ":"), ("#222222", "-")]
_WIDTH = 720  # pixels on the page; the file has twice as many


Run = TrainRun | Path | str


def loss(*runs: Run | Sequence[Run], labels: Sequence[str] = ()) -> Picture:
    """Draw the training loss against the step, and the test accuracy below it.

    runs     what `train(...)` returned, or run folders; also as one list
    labels   a name for each run; without them the legend names the folders

    Raises FileNotFoundError for a folder that holds no run, ValueError for labels that do not fit, TypeError
    for what is no run.
    """
    if len(runs) == 1 and isinstance(runs[0], list | tuple):
        runs = tuple(runs[0])
    if not runs:
        raise ValueError("show.loss needs at least one run: what train(...) returned, or a run folder.")
    for run in runs:
        if not isinstance(run, TrainRun | Path | str):
            raise TypeError(f"show.loss draws what train(...) returned, or a run folder, not {type(run).__name__}.")
    if labels and len(labels) != len(runs):
        raise ValueError(f"show.loss got {len(runs)} runs but {len(labels)} labels.")
    read = [run if isinstance(run, TrainRun) else TrainRun.read(run) for run in runs]
    names = list(labels) or [run.dir.name for run in read]
    tested = any(run.rows("eval") for run in read)
    size = (_WIDTH / 100, 5.4 if tested else 4.0)
    figure = Figure(figsize=size, dpi=200, facecolor="white", layout="constrained")
    panels = figure.subplots(2 if tested else 1, sharex=True, squeeze=False, height_ratios=[5, 2][: 1 + tested])
    axes = list(panels[:, 0])
    for k, (run, name) in enumerate(zip(read, names, strict=True)):
        colour, dash = STYLES[k % len(STYLES)]
        _loss_line(axes[0], run, _legend(run, name), colour, dash)
        if tested:
            _accuracy_marks(axes[1], run, colour)
    _finish(figure, axes, read)
    text = "\n".join(f"{name}: {run.summary()}" for run, name in zip(read, names, strict=True))
    return Picture(png_of(figure), f"Training loss against the step. {text}", text, _WIDTH)


def _legend(run: TrainRun, name: str) -> str:
    """A run that did not finish says so, where its line ends early."""
    return name if run.status == "finished" else f"{name} ({run.status})"


def _loss_line(axes: Axes, run: TrainRun, label: str, colour: str, dash: str) -> None:
    steps, losses = run.steps, run.losses
    axes.plot(steps, losses, dash, color=colour, lw=1.6, label=label, marker="." if len(steps) < 40 else None)
    broken = [step for step, value in zip(steps, losses, strict=True) if not math.isfinite(value)]
    if broken:
        axes.axvline(broken[0], color=colour, lw=1, ls=":")
        where = axes.get_xaxis_transform()
        text = f" not finite from step {broken[0]}"
        axes.text(broken[0], 0.95, text, color=colour, transform=where, va="top", fontsize=9)


def _accuracy_marks(axes: Axes, run: TrainRun, colour: str) -> None:
    rows = run.rows("eval")
    steps, values = [row["step"] for row in rows], [row["accuracy"] for row in rows]
    axes.plot(steps, values, "o-", color=colour, lw=0.8, ms=4)
    if rows:
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(f"{values[-1]:.3f}", (steps[-1], values[-1]), color=colour, fontsize=9, **place)


def _finish(figure: Figure, axes: list[Axes], runs: list[TrainRun]) -> None:
    values = [value for run in runs for value in run.losses if math.isfinite(value) and value > 0]
    top, bottom = axes[0], axes[-1]
    if values and max(values) > 10 * min(values):
        top.set_yscale("log")
    if not values:
        top.text(0.5, 0.5, "no step was logged", ha="center", va="center", transform=top.transAxes)
        top.set(xticks=[], yticks=[])
    top.set_ylabel("training loss (nats)")
    bottom.set_xlabel("optimizer step")
    if values:
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(axes) > 1:
        bottom.set_ylabel("test accuracy")
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1 or runs[0].status != "finished":
        top.legend(frameon=False, fontsize=9)
    figure.suptitle(_title(runs), fontsize=12)
    notes = sorted({run.note for run in runs if run.note})
    if notes:
        top.set_title("; ".join(notes), fontsize=10, color="#C24E00", weight="bold", wrap=True)


def _title(runs: list[TrainRun]) -> str:
    data = sorted({run.facts.get("data", {}).get("name", "unknown data") for run in runs})
    ranks = sorted({run.facts.get("ranks", 1) for run in runs})
    counted = " and ".join(map(str, ranks)) + (" rank" if ranks == [1] else " ranks")
    return f"Training on {', '.join(data)}, {counted}"
