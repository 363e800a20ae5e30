"""A canvas as SVG text. No ids, no links: several pictures on a page cannot disturb each other."""

import math
from xml.sax.saxutils import escape, quoteattr

from course_lib.show.shapes import Canvas, Line, Rect, Shape, Text


def svg(canvas: Canvas) -> str:
    """An <svg> that fills the width it is given; shapes of a step carry data-step."""
    body = "\n".join(_shape(shape) for shape in canvas.shapes)
    size = f'viewBox="0 0 {canvas.width:g} {canvas.height:g}"'
    alt = f'role="img" aria-label={quoteattr(canvas.alt)}'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {alt}>\n{body}\n</svg>'


def _shape(shape: Shape) -> str:
    step = "" if shape.step is None else f' data-step="{shape.step}"'
    if isinstance(shape, Text):
        only = " only-now" if shape.only_now else ""
        start = f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" class="{shape.look}{only}"{step}'
        return f'{start} text-anchor="{shape.anchor}">{escape(shape.text)}</text>'
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    if isinstance(shape, Rect):
        box = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        return f'<rect {box} class="{shape.look}"{step}>{title}</rect>'
    path = f"M{shape.x1:.1f} {shape.y1:.1f}L{shape.x2:.1f} {shape.y2:.1f}"
    line = f'<path d="{path}" class="{shape.look}"/>'
    if not shape.head:
        return line if not step else f"<g{step}>{title}{line}</g>"
    return f'<g class="{shape.head}"{step}>{title}{line}{_head(shape)}</g>'


def _head(line: Line) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in head_points(line))
    if line.head == "arrow":
        return f'<polygon points="{points}" class="tip"/>'
    a, b, c, d = points.split()
    return f'<path d="M{a}L{b}M{c}L{d}" class="lost solid"/>'


def head_points(line: Line, size: float = 9.0) -> list[tuple[float, float]]:
    """Corners of the arrow's tip, or the four ends of the cross, in pixels."""
    x, y = line.x2, line.y2
    if line.head == "cross":
        s = size * 0.6
        return [(x - s, y - s), (x + s, y + s), (x - s, y + s), (x + s, y - s)]
    angle = math.atan2(line.y2 - line.y1, line.x2 - line.x1)
    return [(x, y)] + [(x - size * math.cos(angle + turn), y - size * math.sin(angle + turn)) for turn in (-0.4, 0.4)]
