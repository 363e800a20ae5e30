"""How far training on several ranks is from one process, step by step: `show.difference(one, {"by hand": ranks})`."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.show.picture import Picture, png_of

# Okabe and Ito's colours, each with a mark of its own.
_STYLES = [("#0072B2", "o-"), ("#D55E00", "s--"), ("#009E73", "^-."), ("#8F4A78", "v:"), ("#222222", "D-")]
_WIDTH = 720  # pixels on the page; the file has twice as many
_FLOOR = 1e-17  # where a difference of zero is drawn, which a logarithmic axis cannot show
_ROUNDING = 1e-10  # relative: what float64 may lose in a few steps


def difference(one: torch.Tensor, runs: Mapping[str, Sequence[torch.Tensor]]) -> Picture:
    """Draw the largest difference of the weights over all ranks, against the step, on a logarithmic axis.

    one    weights of one process after each step: (steps, weights)
    runs   for each label the same of each rank, such as `run(...).results`

    The difference is relative to the largest weight of `one` at that step. Raises ValueError for other shapes.
    """
    found = {label: _apart(one, ranks, label) for label, ranks in runs.items()}
    figure = Figure(figsize=(_WIDTH / 100, 4.0), dpi=200, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for k, (label, values) in enumerate(found.items()):
        colour, style = _STYLES[k % len(_STYLES)]
        heights = [max(value, _FLOOR) for value in values]
        axes.plot(range(1, len(values) + 1), heights, style, color=colour, lw=1.4, ms=5, label=label)
    _finish(axes)
    figure.legend(frameon=False, fontsize=9, loc="outside right center")
    lines = [f"{label:<24} first {values[0]:.1e}   last {values[-1]:.1e}" for label, values in found.items()]
    text = "largest relative difference to one process, by step\n" + "\n".join(lines)
    return Picture(png_of(figure), f"Difference to one process, by step. {'; '.join(lines)}", text, _WIDTH)


def _apart(one: torch.Tensor, ranks: Sequence[torch.Tensor], label: str) -> list[float]:
    if one.dim() != 2 or not ranks or any(each.shape != one.shape for each in ranks):
        raise ValueError(f"{label}: give a tensor (steps, weights) for each rank, of the shape of the one to compare.")
    furthest = torch.stack([(each - one).abs().amax(1) for each in ranks]).amax(0)
    return (furthest / one.abs().amax(1)).tolist()


def _finish(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 3, max(10.0, axes.get_ylim()[1]))
    axes.axhspan(_FLOOR / 3, _ROUNDING, color="#999999", alpha=0.15, lw=0)
    axes.text(0.99, _ROUNDING / 3, "rounding", ha="right", va="top", fontsize=9, transform=axes.get_yaxis_transform())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="optimizer steps done", ylabel="difference of the weights, relative")
    axes.set_title("How far from one process on the whole batch", fontsize=12)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
