"""Where things stand in the picture of a tracked run: a row for each rank, in it the chunks of its tensor."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch

from course_lib.collectives.chunks import split
from course_lib.show.ring_steps import decode
from course_lib.show.shapes import Line, Rect, Shape, Text

FEW = 4  # ranks, up to which everything is written out
COLOURS = 8  # looks rank-0 to rank-7; more ranks begin again, their numbers tell them apart


@dataclass(frozen=True)
class Board:
    """The geometry, in pixels. `small` is for panels of an overview: no texts."""

    size: int
    numel: int
    left: float
    top: float
    width: float
    small: bool = False

    @property
    def gap(self) -> float:
        """Between two chunks."""
        return 6.0 if self.small else max(60.0 / self.size, 8.0)

    @property
    def chunk(self) -> float:
        """Width of a chunk."""
        return (self.width - self.gap * (self.size - 1)) / self.size

    @property
    def height(self) -> float:
        """Height of a row of chunks."""
        return 14.0 if self.small else 40.0 if self.size <= 4 else 30.0

    @property
    def pitch(self) -> float:
        """From one row to the next; messages pass between them."""
        return 29.0 if self.small else 82.0 if self.size <= 4 else 62.0

    @property
    def bottom(self) -> float:
        return self.top + self.pitch * (self.size - 1) + self.height

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First element and length of each chunk."""
        lengths = [len(part) for part in split(torch.empty(self.numel), self.size)]
        return list(zip(accumulate([0, *lengths]), lengths, strict=False))

    def y(self, rank: int) -> float:
        """Top of a rank's row."""
        return self.top + self.pitch * rank

    def x(self, chunk: int) -> float:
        return self.left + (self.chunk + self.gap) * chunk

    def chunk_of(self, element: int) -> int:
        """The chunk that an element is in."""
        return next(k for k, (first, length) in enumerate(self.spans) if first <= element < first + length)

    def edges(self, first: int, length: int) -> tuple[float, float]:
        """Left and right end of a run of elements."""
        ends = []
        for element, side in ((first, 0), (first + length - 1, 1)):
            chunk = self.chunk_of(element)
            begin, many = self.spans[chunk]
            ends.append(self.x(chunk) + self.chunk * (element + side - begin) / many)
        return ends[0], ends[1]

    def row(self, rank: int, tensor: list[float], fresh: Collection[int] = ()) -> Iterator[Shape]:
        """One rank's tensor: each chunk striped by the ranks that are summed in it; in `fresh` ones data arrived.

        With many ranks only fresh chunks carry the numbers of the ranks, and finished ones are plain: each stripe is
        an element of the page.
        """
        y = self.y(rank)
        for number, (first, length) in enumerate(self.spans):
            x, element = self.x(number), first
            inside = tensor[first : first + length]
            whole = bool(length) and all(
                decode(value, self.size) == dict.fromkeys(range(self.size), 1) for value in inside
            )
            for value, same in groupby(inside if self.size <= FEW or not whole else ()):
                many = len(list(same))
                numbers = not self.small and (self.size <= FEW or number in fresh)
                yield from self._stripes(y, *self.edges(element, many), value, numbers)
                element += many
            look = ("whole" if self.size <= FEW else "done") if whole else "box" if length else "wait"
            yield Rect(x, y, self.chunk, self.height, look)
            if whole and not self.small and self.size <= FEW:
                yield Text(x + self.chunk - 4, y - 4, "✓", "strong", "end")
            elif whole and not self.small:
                yield Text(x + self.chunk / 2, y + self.height / 2 + 5, "✓", "strong", "middle")

    def _stripes(self, y: float, left: float, right: float, value: float, numbers: bool) -> Iterator[Shape]:
        found = decode(value, self.size)
        if found is None:
            yield Rect(left, y, right - left, self.height, "wait")
            if not self.small:
                yield Text((left + right) / 2, y + self.height / 2 + 5, "?", "text", "middle")
            return
        wide = (right - left) / self.size
        for rank, times in found.items():
            x = left + wide * rank
            yield Rect(x, y, wide, self.height, f"rank-{rank % COLOURS}")
            if times > 1:  # a bar of warning at the top and the bottom
                yield Rect(x, y, wide, self.height / 5, "twice")
            if numbers and wide >= 7.5:
                text = f"{rank}" if times == 1 else f"{rank}×{times}" if wide >= 24 else f"×{times}"
                yield Text(x + wide / 2, y + self.height / 2 + 6, text, "text" if wide >= 10 else "small", "middle")

    def mark(self, rank: int, first: int, length: int) -> Shape:
        """A frame around what has just arrived."""
        left, right = self.edges(first, length)
        return Rect(left - 1.5, self.y(rank) - 1.5, right - left + 3, self.height + 3, "new")


def arrow_path(points: list[tuple[float, float]], look: str, title: str, head: str = "arrow") -> list[Line]:
    """A bent arrow: straight lines through the points, the head at the last."""
    last = len(points) - 2
    return [Line(*a, *b, look, None, title, head if k == last else "") for k, (a, b) in enumerate(pairwise(points))]
