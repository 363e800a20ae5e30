"""Numbers by step, one line for each way to do something: `show.curves(...)`."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.show.loss_picture import STYLES
from course_lib.show.picture import Picture, png_of

_WIDTH = 640  # pixels on the page; the file has twice as many


def curves(lines: Mapping[str, Sequence[float]], x: str, y: str, log: bool = False) -> Picture:
    """Draw each line against the place of its values, counted from 1.

    lines  name: values, at most five lines
    x, y   what stands at the axes, with units
    log    a logarithmic axis for the values
    """
    if not 1 <= len(lines) <= len(STYLES) or not all(lines.values()):
        raise ValueError(f"show.curves draws 1 to {len(STYLES)} lines with at least one value each.")
    figure = Figure(figsize=(_WIDTH / 100, 3.6), dpi=200, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for (name, values), (colour, dash) in zip(lines.items(), STYLES, strict=False):
        axes.plot(range(1, len(values) + 1), values, dash, color=colour, label=name, linewidth=1.6)
    axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    text = "; ".join(f"{name}: {values[0]:.4g} to {values[-1]:.4g}" for name, values in lines.items())
    return Picture(png_of(figure), f"{y} against {x}. First and last values: {text}.", text, _WIDTH)
