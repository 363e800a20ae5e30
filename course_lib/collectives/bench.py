"""`course bench ring`: the course's ring all-reduce over three transports, beside gloo and what the machine can do."""

import argparse
import json
import re
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from course_lib.collectives.bench_measure import CONTENDERS, GLOO, LIMITS, Samples, measure, over_ranks, progress, words
from course_lib.collectives.bench_plot import plot

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


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
            low, middle, high = _quartiles([sample.seconds for sample in measured])
            cpu, sleeps = (statistics.median(getattr(s, field) for s in measured) for field in ("cpu", "sleeps"))
            bandwidth, limit = nbytes / middle / 1e9, name in LIMITS
            bus = bandwidth if limit else bandwidth * 2 * (ranks - 1) / ranks
            faster = None if limit else base / middle
            rows.append(Row(ranks, nbytes, name, middle, low, high, bandwidth, bus, faster, cpu, sleeps))
    return rows


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def bench(ranks: int, sizes: list[int], rounds: int) -> list[Row]:
    """Measure in one run of so many ranks."""
    from course_lib.launch import run  # collectives know nothing of launch; the command that starts ranks must

    with progress(sys.stderr):
        result = run(measure, ranks, args=(sizes, rounds), timeout=3600, watch=False)
    return rows_of(ranks, over_ranks(result.results))


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


def machine() -> str:
    """What the numbers were measured on."""
    return f"{psutil.cpu_count()} cores, torch {torch.__version__}, {sys.platform}"


def size_of(text: str) -> int:
    """Bytes of "4096", "64K", "1 MB"; a multiple of 4, for float32."""
    found = re.fullmatch(r"(\d+) *([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    nbytes = int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[found[2].upper()] if found else 0
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, a multiple of 4, or 64K, 1M.")
    return nbytes


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="course bench ring", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--sizes", type=size_of, nargs="+", default=SIZES, metavar="SIZE", help="such as 4K 1M")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each contender and size")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw bus bandwidth against size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    options = parser.parse_args(argv)
    if min(options.ranks) < 2 or options.rounds < 1:
        parser.error("--ranks takes numbers from 2, --rounds from 1")
    for path in (options.plot, options.json):
        if path and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    if options.plot and options.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {options.plot} must end in .png, .svg or .pdf")
    need, free = max(options.ranks) * max(options.sizes) * 8, psutil.virtual_memory().available
    if need > free:  # tensors, copies, buffers of gloo and of the sockets
        parser.error(f"{max(options.ranks)} ranks with {words(max(options.sizes))} need about {words(need)} of memory, "
                     f"and {words(free)} are free")  # fmt: skip
    return options


def main(argv: list[str]) -> int:
    """Command line; returns the exit code."""
    options = _options(argv)
    rows = []
    for ranks in options.ranks:
        rows += bench(ranks, options.sizes, options.rounds)
    print(f"{machine()}; median of {options.rounds} rounds, the slowest rank counts")
    print(table(rows), summary(rows), sep="\n\n")
    if options.json:
        facts = {"machine": machine(), "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot, f"{machine()}; median of {options.rounds} rounds, band: quartiles")
    return 0
