"""Where things stand when each rank has a lane and time runs to the right. Everything in pixels."""

import math
from dataclasses import dataclass

from course_lib.show.shapes import Line, Shape, Text

LEFT, RIGHT, TOP, WIDTH = 72.0, 24.0, 40.0, 900.0
BELOW = 74.0  # axis, its title and the legend


@dataclass(frozen=True)
class Lanes:
    """The scale: `x` of a time in seconds, `y` of a rank's line."""

    ranks: int
    begin: float
    end: float
    axis_title: str = "ms since the ranks began"

    @property
    def pitch(self) -> float:
        """Distance of two lanes: generous for a few ranks, tight for many."""
        return 84.0 if self.ranks <= 4 else 62.0 if self.ranks <= 8 else 36.0

    @property
    def half(self) -> float:
        """Height of the upper (sends) and lower (receives) half of a lane's bars."""
        return 9.0 if self.ranks <= 8 else 6.0

    @property
    def bottom(self) -> float:
        return TOP + self.pitch * self.ranks

    @property
    def height(self) -> float:
        return self.bottom + BELOW

    def x(self, seconds: float) -> float:
        return LEFT + (seconds - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def y(self, rank: int) -> float:
        return TOP + self.pitch * (rank + 0.5)

    def frame(self) -> list[Shape]:
        """Lane lines with the ranks' names, and the time axis in milliseconds."""
        shapes: list[Shape] = []
        for rank in range(self.ranks):
            y = self.y(rank)
            shapes.append(Text(LEFT - 12, y + 5, f"rank {rank}", "text", "end"))
            shapes.append(Line(LEFT, y, WIDTH - RIGHT, y, "lane"))
        return shapes + self.axis()

    def axis(self) -> list[Shape]:
        """The time axis in milliseconds, and its grid."""
        shapes: list[Shape] = []
        for tick in ticks(self.begin * 1000, self.end * 1000):
            x = self.x(tick / 1000)
            shapes.append(Line(x, TOP, x, self.bottom, "grid"))
            shapes.append(Text(x, self.bottom + 16, f"{tick:.10g}", "small", "middle"))
        shapes.append(Text((LEFT + WIDTH - RIGHT) / 2, self.bottom + 36, self.axis_title, "small", "middle"))
        return shapes


def span(times: list[float]) -> tuple[float, float]:
    """First and last moment to draw. Starts at 0 unless most of the picture would then be empty."""
    if not times:
        return 0.0, 0.001
    first, last = min(times), max(times)
    begin = 0.0 if 0 <= first <= 0.4 * last else first - 0.04 * (last - first)
    return begin, last + max(0.02 * (last - begin), 1e-6)


def ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Round numbers in [low, high], a distance of 1, 2 or 5 times a power of ten apart.

    >>> ticks(0, 10), ticks(0.13, 0.62, about=5)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.2, 0.3, 0.4, 0.5, 0.6])
    """
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]
