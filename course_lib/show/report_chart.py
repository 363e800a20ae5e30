"""A line chart as inline SVG: text and axes take the colour of the page, so it fits a dark screen and paper."""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from statistics import median

from course_lib.show.report_read import Series

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 250, 62, 24, 34, 40
MOST = 500  # columns of points that a line keeps
LONG, PIECES = 300, 100  # a line of more points is drawn faint, with the medians of so many pieces on it


def chart(
    lines: dict[str, Series], y: str, marks: Sequence[int] = (), log: bool = False, zero: bool = False, last: int = 0
) -> str:
    """Draw lines (at most five) over the optimizer step.

    y      what stands at the axis, with its unit
    marks  steps after which a launch went on: dotted
    log    a logarithmic axis when the values differ more than tenfold
    zero   the axis begins at 0
    last   the step at the right end, when the lines end before
    """
    finite = {name: [(s, v) for s, v in points if math.isfinite(v)] for name, points in lines.items()}
    values = [value for points in finite.values() for _, value in points]
    steps = [step for points in lines.values() for step, _ in points]
    log = log and min(values, default=0) > 0 and max(values) > 10 * min(values)
    across, up = Axis(0, max([last, *steps, *marks]), whole=True), Axis(*_range(values, log, zero), log=log)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y)} over the optimizer step">']
    parts += _frame(across, up, y)
    for step in marks:
        x = _x(across, step)
        parts.append(
            f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"><title>went on after step {step}</title></path>'
        )
    for k, points in enumerate(lines.values()):
        parts += _line(points, across, up, k)
    return "".join([*parts, _legend(list(lines)), "</svg>"])


class Axis:
    """From values to 0 ... 1, and the round values between its ends."""

    def __init__(self, low: float, high: float, log: bool = False, whole: bool = False) -> None:
        self.log, self.whole = log, whole
        self.low, self.high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Three to six round values."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            factors = (1, 2, 5) if self.high < 100 * self.low else (1,)
            every = max(1, (last - first) // 5)
            values = [f * 10.0**k for k in range(first, last + 1, every) for f in factors]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
            step = max(1, round(step)) if self.whole else step
            values = [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in values if self.low * 0.9999 <= value <= self.high * 1.0001 or value == 0]


def _range(values: list[float], log: bool, zero: bool) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        return low / 1.1, high * 1.1
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (min(low, 0.0), high + room) if zero else (low - room, high + room)


def _x(across: Axis, step: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * across.place(step)


def _y(up: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * up.place(value)


def number(value: float) -> str:
    """
    >>> number(25000), number(0.05), number(0)
    ('25,000', '0.05', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(across: Axis, up: Axis, y: str) -> list[str]:
    parts = [f'<text x="4" y="14">{escape(y)}</text>']
    for value in up.ticks():
        place = _y(up, value)
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in across.ticks():
        place = _x(across, value)
        parts.append(f'<path class="axis" d="M{place:.1f} {HEIGHT - BOTTOM}v4"/>')
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return [*parts, f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">optimizer step</text>']


def _line(points: Series, across: Axis, up: Axis, k: int) -> list[str]:
    """Broken where a value is not finite; dots when there are few points, or one alone."""
    pieces: list[list[str]] = [[]]
    for step, value in thinned(points):
        if math.isfinite(value):
            pieces[-1].append(f"{_x(across, step):.1f},{_y(up, value):.1f}")
        elif pieces[-1]:
            pieces.append([])
    look = f"line s{k}" if len(points) <= LONG else f"line faint s{k}"
    parts = [f'<polyline class="{look}" points="{" ".join(piece)}"/>' for piece in pieces if len(piece) > 1]
    if len(points) > LONG:
        smooth = " ".join(f"{_x(across, step):.1f},{_y(up, value):.1f}" for step, value in medians(points))
        parts.append(f'<polyline class="line s{k}" points="{smooth}"/>')
    if len(points) <= 30 or not parts:
        dots = (place.split(",") for piece in pieces for place in piece)
        parts += [f'<circle class="dot s{k}" cx="{x}" cy="{y}" r="2.6"/>' for x, y in dots]
    return parts


def thinned(points: Series) -> Series:
    """At most the lowest and the highest point of each of MOST pieces, and what is not finite.

    >>> len(thinned([(k, k % 7) for k in range(100_000)])) <= 2 * MOST
    True
    """
    if len(points) <= 2 * MOST:
        return points
    kept: Series = []
    for k in range(MOST):
        piece = points[len(points) * k // MOST : len(points) * (k + 1) // MOST]
        finite = [point for point in piece if math.isfinite(point[1])] or piece
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept += sorted(ends | {point for point in piece if not math.isfinite(point[1])})
    return kept


def medians(points: Series) -> Series:
    """The median step and value of each of PIECES pieces; values that are not finite do not count.

    >>> medians([(k, float(k % 2)) for k in range(300)])[:2]
    [(1, 0.0), (4, 1.0)]
    """
    finite = [point for point in points if math.isfinite(point[1])]
    bounds = [len(finite) * k // PIECES for k in range(PIECES + 1)]
    pieces = [finite[low:high] for low, high in pairwise(bounds) if low < high]
    return [(piece[len(piece) // 2][0], median(value for _, value in piece)) for piece in pieces]


def _legend(names: list[str]) -> str:
    """Names of several lines, right above the picture."""
    if len(names) < 2:
        return ""
    parts, x = [], WIDTH - RIGHT - sum(34 + 6.6 * len(name) for name in names)
    for k, name in enumerate(names):
        parts.append(f'<path class="line s{k}" d="M{x:.0f} 24h18"/><text x="{x + 22:.0f}" y="28">{escape(name)}</text>')
        x += 34 + 6.6 * len(name)
    return "".join(parts)
