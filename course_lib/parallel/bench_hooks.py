"""`course bench hooks`: a training step with gloo's all-reduce beside the same step with other comm hooks."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from course_lib.collectives.bench import machine
from course_lib.collectives.bench_measure import words
from course_lib.collectives.bench_progress import progress
from course_lib.collectives.bench_rows import quartiles
from course_lib.parallel.bench_hooks_measure import ALONE, CONTENDERS, GLOO, MODELS, Times, measure, over_ranks


@dataclass(frozen=True)
class Row:
    """One contender on one model: median seconds a step of the slowest rank, and quartiles.

    times_faster    than gloo's all-reduce in the same rounds: of the whole step
    communication   part of the step that is more than what a step without any all-reduce takes; 0 if it is not more
    """

    ranks: int
    model: str
    nbytes: int
    name: str
    seconds: float
    low: float
    high: float
    times_faster: float
    communication: float


def rows_of(ranks: int, found: dict[str, Times]) -> list[Row]:
    """Medians, quartiles and ratios."""
    rows = []
    for model, times in found.items():
        spread = {name: quartiles(seconds) for name, seconds in times.seconds.items()}
        base, alone = spread[GLOO][1], spread[ALONE][1]
        for name, (low, middle, high) in spread.items():
            rest = max(0.0, 1 - alone / middle)
            rows.append(Row(ranks, model, times.nbytes, name, middle, low, high, base / middle, rest))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as text, a block for each model and number of ranks."""
    lines = [f"{'ranks':>5}  {'model, gradients':<20}{'':<19}{'step':>9}  {'quartiles':<20}{'vs gloo':>8}{'comm':>7}"]
    last = None
    for row in rows:
        if last not in (None, (row.ranks, row.model)):
            lines.append("")
        last = (row.ranks, row.model)
        model, spread = f"{row.model}, {words(row.nbytes)}", f"{row.low * 1e3:.1f} – {row.high * 1e3:.1f} ms"
        lines.append(
            f"{row.ranks:>5}  {model:<20}{row.name:<19}{row.seconds * 1e3:>6.1f} ms  {spread:<20}"
            f"{row.times_faster:>7.2f}x{row.communication:>7.0%}"
        )
    return "\n".join(lines)


def _options(argv: list[str]) -> argparse.Namespace:
    told = "\n".join(f"  {name:<18} {text}" for name, text in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        prog="course bench hooks", description=f"{__doc__.replace('`', '')}\n\n{told}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="default: 2 4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each contender (default: 9)")
    parser.add_argument("--steps", type=int, default=4, help="training steps that are timed together (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    options = parser.parse_args(argv)
    if min(options.ranks) < 2 or options.rounds < 1 or options.steps < 1:
        parser.error("--ranks takes numbers from 2, --rounds and --steps from 1")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} for {options.json.name}")
    return options


def main(argv: list[str]) -> int:
    """Command line; returns the exit code: 1 when the ranks cannot start or one of them fails."""
    from course_lib.launch import run  # parallel knows nothing of launch; a command that starts ranks must

    options = _options(argv)
    rows: list[Row] = []
    try:
        for ranks in options.ranks:
            with progress(sys.stderr):
                arguments = (options.models, options.rounds, options.steps)
                results = run(measure, ranks, args=arguments, timeout=3600, watch=False).results
            rows += rows_of(ranks, over_ranks(results))
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{machine()}; median of {options.rounds} rounds of {options.steps} steps, the slowest rank counts")
    print(table(rows))
    if options.json:
        facts = {"machine": machine(), "rounds": options.rounds, "steps": options.steps}
        options.json.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0
