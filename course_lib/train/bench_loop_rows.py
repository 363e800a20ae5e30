"""From what the ranks measured to the rows and the text table of `course bench loop`."""

from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.collectives.bench_rows import quartiles
from course_lib.train.bench_loop_job import TASKS
from course_lib.train.bench_loop_measure import BARE, Found

HEADING = f"{'a step, with quartiles':<23}{'wall ms':>9}{'':17}{'vs bare':<21}{'CPU ms':>9}{'':17}vs bare"


@dataclass(frozen=True)
class Spread:
    """Lower quartile, median and upper quartile over the rounds."""

    low: float
    middle: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Of one value for each round.

    >>> spread([3.0, 1.0, 2.0])
    Spread(low=1.5, middle=2.0, high=2.5)
    """
    return Spread(*quartiles(list(values)))


@dataclass(frozen=True)
class Row:
    """One contender on one task.

    wall, cpu               seconds a step
    wall_ratio, cpu_ratio   what the bare loop took in the same round / what this one took: 1 is equal, less is slower
    loss, apart             at the end: the loss, and the largest difference of a weight to the bare loop's
    """

    ranks: int
    task: str
    name: str
    wall: Spread
    cpu: Spread
    wall_ratio: Spread
    cpu_ratio: Spread
    loss: float
    apart: float


def rows_of(ranks: int, steps: int, found: dict[str, Found]) -> list[Row]:
    """Medians, quartiles and ratios; `steps` of a block, 0: those of the task."""
    rows = []
    for task, result in found.items():
        count, base = steps or TASKS[task].steps, result.blocks[BARE]
        for name, blocks in result.blocks.items():
            pairs = list(zip(base, blocks, strict=True))
            rows.append(
                Row(
                    ranks, task, name,
                    spread(block.wall / count for block in blocks),
                    spread(block.cpu / count for block in blocks),
                    spread(bare.wall / block.wall for bare, block in pairs),
                    spread(bare.cpu / block.cpu for bare, block in pairs),
                    result.loss[name], result.apart[name],
                )
            )  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """The rows as text, a block for each task."""
    lines, last = [], None
    for row in rows:
        if row.task != last:
            lines += [""] * (last is not None) + [
                f"{row.task}: {TASKS[row.task].about}, {row.ranks} ranks",
                HEADING,
            ]
            last = row.task
        lines.append(
            f"{row.name:<23}{_time(row.wall)}{_ratio(row.wall_ratio)}{_time(row.cpu)}{_ratio(row.cpu_ratio)}".rstrip()
        )
    return "\n".join(lines)


def _time(seconds: Spread) -> str:
    low, middle, high = map(_milliseconds, (seconds.low, seconds.middle, seconds.high))
    return f"{middle:>9} {f'{low} – {high}':<16}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.9995 else f"{seconds * 1e3:.0f}"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.middle:.3f} {f'{ratio.low:.3f} – {ratio.high:.3f}':<15}"
