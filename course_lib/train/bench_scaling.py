"""`course bench scaling`: how many times faster N ranks train than one, a core and a thread each."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from course_lib.cluster.cores import cores
from course_lib.collectives.bench import machine
from course_lib.collectives.bench_measure import words
from course_lib.collectives.bench_progress import progress
from course_lib.parallel.bench_hooks_measure import Times, over_ranks
from course_lib.train.bench_loop_rows import Spread, spread
from course_lib.train.bench_scaling_measure import APART, CONTENDERS, LOADS, ONE, ONE_AGAIN, measure

NOTE = """\
Weak scaling: the same batch a rank. Samples/s counts the slowest rank. "of 1 rank" is rate / (ranks at work x rate of
"1 rank"), "of ceiling" is rate / rate of "N apart", both from blocks of the same round. A core that works alone may run
at a higher clock and has memory and caches for itself: what "N apart" loses is lost to that, not to communication."""


@dataclass(frozen=True)
class Row:
    """One contender on one load.

    rate        samples a second of all ranks at work together
    efficiency  rate / (ranks at work x rate of "1 rank")
    of_ceiling  rate / rate of "N apart"; None for one rank
    """

    ranks: int
    load: str
    nbytes: int
    name: str
    rate: Spread
    efficiency: Spread
    of_ceiling: Spread | None


def rows_of(ranks: int, steps: int, found: dict[str, Times]) -> list[Row]:
    """Rates and efficiencies; `steps` of a block, 0: those of the load."""
    rows = []
    for load, result in found.items():
        samples = LOADS[load].batch * (steps or LOADS[load].steps)
        workers = {name: 1 if name in (ONE, ONE_AGAIN) else ranks for name in result.seconds}
        rates = {
            name: [workers[name] * samples / seconds for seconds in blocks] for name, blocks in result.seconds.items()
        }
        for name, of_rounds in rates.items():
            share = [rate / (workers[name] * one) for rate, one in zip(of_rounds, rates[ONE], strict=True)]
            ceiling = [rate / best for rate, best in zip(of_rounds, rates[APART], strict=True)]
            rows.append(
                Row(
                    ranks, load, result.nbytes, name, spread(of_rounds), spread(share),
                    None if name in (ONE, ONE_AGAIN) else spread(ceiling),
                )
            )  # fmt: skip
    return rows


def table(rows: list[Row]) -> str:
    """The rows as text, a block for each load."""
    lines, last = [], None
    for row in rows:
        if row.load != last:
            lines += [""] * (last is not None) + [
                f"{row.load}: {LOADS[row.load].about}; {words(row.nbytes)} of gradients",
                f"{'with quartiles':<18}{'samples/s':>10}{'':<20}{'of 1 rank':<24}of ceiling",
            ]
            last = row.load
        rate = f"{row.rate.middle:>10.4g} {f'{row.rate.low:.4g} – {row.rate.high:.4g}':<19}"
        name = row.name.replace("N ", f"{row.ranks} ")
        lines.append(f"{name:<18}{rate}{_share(row.efficiency):<24}{_share(row.of_ceiling)}".rstrip())
    return "\n".join(lines)


def _share(part: Spread | None) -> str:
    return f"{part.middle:>6.1%}  {part.low:.1%} – {part.high:.1%}" if part else ""


def warning(ranks: int) -> str:
    """A sentence when there are not as many cores as ranks, else ""."""
    if ranks <= cores():
        return ""
    return (
        f"{ranks} ranks share {cores()} cores: they cannot be {ranks} times as fast as one, so read no efficiency here."
    )


def _options(argv: list[str]) -> argparse.Namespace:
    told = [f"  {name:<15} {text}" for name, text in CONTENDERS.items()]
    told += ["", *(f"  --loads {name:<14} {load.about}" for name, load in LOADS.items())]
    parser = argparse.ArgumentParser(
        prog="course bench scaling", description="\n".join([__doc__.replace("`", ""), "", *told]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="against one; default: 2")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each contender (default: 15)")
    parser.add_argument("--steps", type=int, default=0, help="steps of a block (default: as the load says)")
    parser.add_argument("--quick", action="store_true", help="two blocks of one step, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    options = parser.parse_args(argv)
    if options.ranks < 2 or options.rounds < 1 or options.steps < 0:
        parser.error("--ranks takes numbers from 2, --rounds from 1, --steps from 0")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} for {options.json.name}")
    if options.quick:
        options.rounds, options.steps = 2, 1
    return options


def main(argv: list[str]) -> int:
    """Command line; returns the exit code: 1 when the ranks cannot start, one fails, or equal jobs end unequal."""
    from course_lib.launch import run  # a long import that --help does without

    options = _options(argv)
    try:
        with progress(sys.stderr):
            arguments = (options.loads, options.rounds, options.steps)
            results = run(measure, options.ranks, args=arguments, timeout=7200, watch=False).results
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = rows_of(options.ranks, options.steps, over_ranks(results))
    print(f"{machine()}; one thread a rank; medians of {options.rounds} blocks, in random order in each round\n")
    print(table(rows), NOTE, sep="\n\n")
    if sentence := warning(options.ranks):
        print(sentence)
    if options.json:
        facts = {"machine": machine(), "cores": cores(), "rounds": options.rounds}
        facts["steps"] = {load: options.steps or LOADS[load].steps for load in options.loads}
        facts["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0
