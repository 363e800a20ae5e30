"""From what the ranks measured to the rows and the text tables of `course bench ring`."""

import statistics
from dataclasses import dataclass

from course_lib.collectives.bench_limits import LIMITS
from course_lib.collectives.bench_measure import CONTENDERS, GLOO, Samples, words


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    seconds           median over the rounds, of the slowest rank; low and high are the quartiles
    bandwidth         bytes of the tensor / seconds ("algorithm bandwidth"), in GB/s
    bus_bandwidth     2(N-1)/N times that: what each link carries when the algorithm sends as little as it can, so
                      that numbers of different N compare (nccl-tests, doc/PERFORMANCE.md). For a limit, which is no
                      all-reduce, it is `bandwidth` itself.
    times_faster      than gloo's all_reduce in the same rounds; None for a limit
    cpu, sleeps       CPU-seconds a call, and how often a thread of the rank went to sleep in a call; medians
    """

    ranks: int
    nbytes: int
    name: str
    seconds: float
    low: float
    high: float
    bandwidth: float
    bus_bandwidth: float
    times_faster: float | None
    cpu: float
    sleeps: float


def rows_of(ranks: int, samples: Samples) -> list[Row]:
    """Medians, quartiles and bandwidths of what the ranks found together."""
    rows = []
    for nbytes, found in samples.items():
        base = statistics.median(sample.seconds for sample in found[GLOO])
        for name, measured in found.items():
            low, middle, high = quartiles([sample.seconds for sample in measured])
            cpu, sleeps = (statistics.median(getattr(s, field) for s in measured) for field in ("cpu", "sleeps"))
            bandwidth, limit = nbytes / middle / 1e9, name in LIMITS
            bus = bandwidth if limit else bandwidth * 2 * (ranks - 1) / ranks
            faster = None if limit else base / middle
            rows.append(Row(ranks, nbytes, name, middle, low, high, bandwidth, bus, faster, cpu, sleeps))
    return rows


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(rows: list[Row]) -> str:
    """The rows as text, a block for each size."""
    lines = [
        f"{'ranks':>5} {'size':>7}  {'':<18}{'time':>9}  {'quartiles':<19}{'GB/s':>7}{'bus GB/s':>9}{'vs gloo':>8}"
        f"{'CPU':>9}{'sleeps':>8}"
    ]
    last = None
    for row in rows:
        if last not in (None, (row.ranks, row.nbytes)):
            lines.append("")
        last = (row.ranks, row.nbytes)
        spread = f"{_time(row.low)} – {_time(row.high)}"
        bus = "" if row.name in LIMITS else f"{row.bus_bandwidth:.3g}"
        factor = "" if row.times_faster is None else f"{row.times_faster:.2f}x"
        lines.append(
            f"{row.ranks:>5} {words(row.nbytes):>7}  {row.name:<18}{_time(row.seconds):>9}  {spread:<19}"
            f"{row.bandwidth:>7.3g}{bus:>9}{factor:>8}{_time(row.cpu):>9}{row.sleeps:>8.1f}"
        )
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """How many times faster than gloo, as one small table for each number of ranks."""
    names = [name for name in CONTENDERS if name != GLOO]
    lines = ["times faster than gloo's all_reduce (1 = equal)"]
    for ranks in dict.fromkeys(row.ranks for row in rows):
        lines.append(f"{ranks:>2} ranks" + "".join(f"{name:>18}" for name in names))
        for nbytes in dict.fromkeys(row.nbytes for row in rows if row.ranks == ranks):
            found = {row.name: row.times_faster for row in rows if (row.ranks, row.nbytes) == (ranks, nbytes)}
            lines.append(f"{words(nbytes):>8}" + "".join(f"{found[name]:>18.2f}" for name in names))
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
