"""A small loss curve as an <img>.

Cheap enough to be drawn again each second, beside ranks that need the cores.
"""

import base64
import math

WIDTH, HEIGHT, LEFT, BOTTOM = 420, 150, 44, 18
INK, LINE = "#666", "#0072b2"


def curve_svg(steps: list[int], losses: list[float], total: int) -> str:
    """The loss over the steps on a logarithmic axis, as an SVG document; `total` steps fill the width."""
    points = [(step, loss) for step, loss in zip(steps, losses, strict=True) if 0 < loss < math.inf]
    points = points[:: max(1, len(points) // WIDTH)] + points[-1:]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="{INK}">',
        f'<path d="M{LEFT} 6V{HEIGHT - BOTTOM}H{WIDTH - 4}" fill="none" stroke="{INK}"/>',
        f'<text x="{LEFT}" y="{HEIGHT - 4}">0</text>',
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 4}" text-anchor="end">step {total}</text>',
    ]
    if points:
        low, high = math.log(min(p[1] for p in points)), math.log(max(p[1] for p in points))
        span = max(high - low, 1e-9)

        def place(step: int, loss: float) -> str:
            x = LEFT + (WIDTH - LEFT - 4) * step / max(total, points[-1][0])
            y = 10 + (HEIGHT - BOTTOM - 14) * (high - math.log(loss)) / span
            return f"{x:.1f},{y:.1f}"

        line = " ".join(place(*point) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
        for y, value in ((14, high), (HEIGHT - BOTTOM - 1, low)):
            parts.append(f'<text x="{LEFT - 4}" y="{y}" text-anchor="end">{math.exp(value):.2g}</text>')
    return "".join([*parts, "</svg>"])


def curve_image(steps: list[int], losses: list[float], total: int) -> str:
    """The same as an <img> tag: no script, no inline SVG, so an untrusted notebook shows it too."""
    data = base64.b64encode(curve_svg(steps, losses, total).encode()).decode()
    return f'<img alt="training loss over steps" src="data:image/svg+xml;base64,{data}">'
