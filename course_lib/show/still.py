"""A canvas as PNG, for places that show no SVG: an untrusted notebook, a PDF, an e-mail."""

from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.patheffects import withStroke

from course_lib.show.looks import LOOKS, SIZES
from course_lib.show.picture import png_of
from course_lib.show.shapes import Canvas, Line, Rect, Shape, Text
from course_lib.show.svg import head_points

_DOTS = 100  # an inch; canvas pixels are 1/100 inch
_ALIGN = {"start": "left", "middle": "center", "end": "right"}


def png(canvas: Canvas, scale: float = 1.5) -> bytes:
    """The canvas on white, `scale` dots a pixel. Figure, not pyplot: the learner's figures stay."""
    figure = Figure(figsize=(canvas.width / _DOTS, canvas.height / _DOTS), dpi=_DOTS * scale, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, canvas.width), ylim=(canvas.height, 0))
    axes.axis("off")
    # add_artist below: add_patch would work out new limits each time, and they are given here
    for order, shape in enumerate(canvas.shapes):
        _draw(axes, shape, order)
    return png_of(figure)


def _draw(axes, shape: Shape, order: int) -> None:
    look = LOOKS[shape.look]
    colour = look.light or "#222222"
    if isinstance(shape, Text):
        if not shape.only_now:
            weight = "bold" if shape.look == "strong" else "normal"
            halo = [withStroke(linewidth=3, foreground="white")] if shape.look == "label" else []
            axes.text(
                shape.x, shape.y, shape.text, ha=_ALIGN[shape.anchor], va="baseline", color=colour,
                fontsize=SIZES[shape.look] * 72 / _DOTS, alpha=look.opacity, weight=weight, parse_math=False,
                path_effects=halo, zorder=order,
            )  # fmt: skip
        return
    width = look.stroke * 72 / _DOTS  # matplotlib counts in points
    dash = (0, tuple(float(d) * 72 / _DOTS / width for d in look.dash.split())) if look.dash else "-"
    if isinstance(shape, Rect):
        inside = (colour, look.fill * look.opacity)
        edge = (colour, look.opacity if width else 0)
        style = {"fc": inside, "ec": edge, "lw": width, "ls": dash, "zorder": order}
        axes.add_artist(Rectangle((shape.x, shape.y), shape.width, shape.height, **style))
        return
    style = {"color": colour, "lw": width, "ls": dash, "alpha": look.opacity, "zorder": order}
    axes.plot([shape.x1, shape.x2], [shape.y1, shape.y2], **style)
    if shape.head:
        _head(axes, shape, style | {"ls": "-"})


def _head(axes, line: Line, style: dict) -> None:
    points = head_points(line)
    if line.head == "arrow":
        axes.add_artist(Polygon(points, fc=style["color"], ec="none", zorder=style["zorder"]))
        return
    for start, end in (points[:2], points[2:]):
        axes.plot(*zip(start, end, strict=True), **style)
