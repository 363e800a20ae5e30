"""`course bench ring`: the course's ring all-reduce over three transports, beside gloo and what the machine can do."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from course_lib.collectives import bench_threads
from course_lib.collectives.bench_measure import measure, over_ranks, words
from course_lib.collectives.bench_plot import plot
from course_lib.collectives.bench_progress import progress
from course_lib.collectives.bench_rows import Row, rows_of, summary, table

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def bench(ranks: int, sizes: list[int], rounds: int) -> list[Row]:
    """Measure in one run of so many ranks."""
    return rows_of(ranks, over_ranks(_run(measure, ranks, (sizes, rounds))))


def _run(fn: Callable, ranks: int, args: tuple) -> list:
    from course_lib.launch import run  # collectives know nothing of launch; a command that starts ranks must

    with progress(sys.stderr):
        return run(fn, ranks, args=args, timeout=3600, watch=False).results


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
    parser = argparse.ArgumentParser(prog="course bench ring", description=__doc__.replace("`", ""))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    parser.add_argument(
        "--sizes", type=size_of, nargs="+", default=SIZES, metavar="SIZE", help="such as 4K 1M (default: 4K to 64M)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each contender and size (default: 9)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw bus bandwidth against size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    parser.add_argument("--threads", action="store_true", help="tell instead which threads take the CPU time (Linux)")
    options = parser.parse_args(argv)
    if min(options.ranks) < 2 or options.rounds < 1:
        parser.error("--ranks takes numbers from 2, --rounds from 1")
    for path in (options.plot, options.json):
        if path and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    if options.plot and options.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {options.plot} must end in .png, .svg or .pdf")
    if options.threads and sys.platform != "linux":
        parser.error("--threads reads /proc, which only Linux has")
    need, free = max(options.ranks) * max(options.sizes) * 8, psutil.virtual_memory().available
    if need > free:  # tensors, copies, buffers of gloo and of the sockets
        parser.error(
            f"{max(options.ranks)} ranks with {words(max(options.sizes))} need about {need / 2**30:.1f} GB of memory, "
            f"and {free / 2**30:.1f} GB are free"
        )
    return options


def main(argv: list[str]) -> int:
    """Command line; returns the exit code: 1 when the ranks cannot start or one of them fails."""
    options = _options(argv)
    try:
        return _tell_threads(options) if options.threads else _compare(options)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1


def _tell_threads(options: argparse.Namespace) -> int:
    for ranks in options.ranks:
        found = _run(bench_threads.cpu_by_thread, ranks, (options.sizes,))[0]
        print(bench_threads.table(ranks, found))
    return 0


def _compare(options: argparse.Namespace) -> int:
    rows = [row for ranks in options.ranks for row in bench(ranks, options.sizes, options.rounds)]
    print(f"{machine()}; median of {options.rounds} rounds, the slowest rank counts")
    print(table(rows), summary(rows), sep="\n\n")
    if options.json:
        facts = {"machine": machine(), "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot, f"{machine()}; median of {options.rounds} rounds, band: quartiles")
    return 0
