"""Which rank sees which samples: `show.shards(shares, samples)`. Repeated and missing samples stand out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.show import words
from course_lib.show.shapes import Canvas, Rect, Shape, Text
from course_lib.show.stepper import Stepper
from course_lib.show.still import png
from course_lib.show.svg import svg

Share = Sequence[int] | Sequence[Sequence[int]]  # of a rank: samples in order, or its batches
LEGEND = "A row for each rank, a box for each sample, a gap between batches; orange: seen more than once."
MOST = 30  # samples drawn of a rank
_LEFT, _TOP, _BOX, _ROW, _GAP, _WIDE = 70, 40, 28, 32, 10, 800  # pixels


@dataclass(frozen=True)
class Deal:
    """The shares as batches (a plain share is one batch), and how often each sample is seen."""

    batches: list[list[list[int]]]
    samples: int

    @property
    def seen(self) -> Counter[int]:
        return Counter(index for share in self.batches for batch in share for index in batch)

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.samples) if index not in self.seen]

    @property
    def repeated(self) -> list[int]:
        return sorted(index for index, times in self.seen.items() if times > 1)


def read(shares: Sequence[Share], samples: int) -> Deal:
    """Raise TypeError or ValueError, with a sentence, for what cannot be drawn."""
    if not isinstance(shares, Sequence) or not all(hasattr(share, "__iter__") for share in shares):
        raise TypeError("show.shards needs a list for each rank: of sample numbers, or of batches of these.")
    found = []
    for share in shares:
        parts = [part.tolist() if hasattr(part, "tolist") else part for part in share]
        nested = bool(parts) and isinstance(parts[0], list | tuple)
        found.append([[int(index) for index in part] for part in (parts if nested else [parts])])
    deal = Deal(found, samples)
    if strange := [index for index in deal.seen if not 0 <= index < samples]:
        raise ValueError(f"show.shards was told of {samples} samples, 0 to {samples - 1}, and one is {strange[0]}.")
    return deal


def shards(shares: Sequence[Share], samples: int) -> Stepper:
    """Draw what each rank sees: a row a rank, a box a sample, a gap between batches.

    shares   for each rank the numbers of its samples in order, or a list of batches
    samples  how many there are: 0 to samples - 1

    A sample that is seen more than once is orange; those that nobody sees are listed below.
    """
    deal = read(shares, samples)
    told = sentence(deal)
    rows = [f"rank {rank}: {' | '.join(' '.join(map(str, b)) for b in s)}" for rank, s in enumerate(deal.batches)]
    canvas = _draw(deal, told)
    return Stepper([svg(canvas)], [LEGEND], png(canvas), told, "\n".join([told, *rows]))


def sentence(deal: Deal) -> str:
    """What there is to see, in words."""
    head = f"{words.count(deal.samples, 'sample')} on {words.count(len(deal.batches), 'rank')}: "
    if not deal.missing and not deal.repeated:
        return head + "each is seen once."
    parts = []
    if deal.repeated:
        parts.append(f"{len(deal.repeated)} seen more than once ({_some(deal.repeated)})")
    if deal.missing:
        parts.append(f"{len(deal.missing)} never seen ({_some(deal.missing)})")
    return f"{head}{', '.join(parts)}."


def _some(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


def _draw(deal: Deal, told: str) -> Canvas:
    shapes: list[Shape] = [Text(10, 24, told, "strong")]
    width = max(_WIDE, _LEFT + 9.0 * len(told))
    for rank, share in enumerate(deal.batches):
        x, y, drawn = float(_LEFT), float(_TOP + rank * _ROW), 0
        shapes.append(Text(10, y + 18, f"rank {rank}", "text"))
        for batch in share:
            for index in batch[: max(0, MOST - drawn)]:
                many = deal.seen[index] > 1
                title = f"sample {index}: seen {words.count(deal.seen[index], 'time')}"
                shapes.append(Rect(x, y, _BOX - 3, _ROW - 8, "again" if many else "done", title=title))
                shapes.append(Text(x + (_BOX - 3) / 2, y + 17, str(index), "small", "middle"))
                x, drawn = x + _BOX, drawn + 1
            x += _GAP if batch else 0
        rest = sum(map(len, share)) - drawn
        if rest:
            shapes.append(Text(x, y + 17, f"and {rest} more", "small"))
            x += 90
        width = max(width, x)
    return Canvas(width + 10, _TOP + len(deal.batches) * _ROW + 6, told, shapes)
