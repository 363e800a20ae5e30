"""`course bench loop`: our training loop, a bare DDP loop and those of other libraries, on an equal job."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from course_lib.collectives.bench import machine
from course_lib.collectives.bench_progress import progress
from course_lib.train.bench_loop_job import TASKS
from course_lib.train.bench_loop_measure import OWN, measure, over_ranks
from course_lib.train.bench_loop_peers import PEERS, missing
from course_lib.train.bench_loop_rows import rows_of, table

NOTE = """\
All contenders run in the same processes and take turns. Each is one whole run; its setting up, its first block and what
it does after its last step are in no time. All take the same batches from equal loaders and end with equal losses.
wall: the slowest rank. CPU: all threads of a rank, on average over the ranks. "vs bare" is speed: what the bare loop
took in the same round / what this one took, so above 1 is faster. In the time of ours: journal, heartbeat, rows of
metrics.jsonl, the schedule of the learning rate, DDP with checks. In that of the Trainer: its hooks, progress counters
and one callback; it has no logger, progress bar or checkpoints."""


def _options(argv: list[str]) -> argparse.Namespace:
    told = [f"  {name:<22} {text}" for name, text in OWN.items()]
    told += [f"  {name:<22} {make.__doc__.splitlines()[0]}" for name, make in PEERS.items()]
    told += ["", *(f"  --tasks {name:<14} {task.about}" for name, task in TASKS.items())]
    parser = argparse.ArgumentParser(
        prog="course bench loop", description="\n".join([__doc__.replace("`", ""), "", *told]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each contender (default: 15)")
    parser.add_argument("--steps", type=int, default=0, help="steps of a block (default: as the task says)")
    parser.add_argument("--no-peers", action="store_true", help="only the bare loop and ours")
    parser.add_argument("--quick", action="store_true", help="two tiny blocks of the small task, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows for programs")
    options = parser.parse_args(argv)
    if options.ranks < 1 or options.rounds < 1 or options.steps < 0:
        parser.error("--ranks and --rounds take numbers from 1, --steps from 0")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} for {options.json.name}")
    if options.quick:
        options.tasks, options.rounds, options.steps = ["small"], 2, 5
    return options


def main(argv: list[str]) -> int:
    """Command line; returns the exit code: 1 when the ranks cannot start, one fails, or the jobs end unequal."""
    from course_lib.launch import run  # a long import that --help does without

    options = _options(argv)
    peers, sentence = missing([] if options.no_peers else list(PEERS))
    try:
        with progress(sys.stderr):
            arguments = (options.tasks, [*OWN, *peers], options.rounds, options.steps)
            results = run(measure, options.ranks, args=arguments, timeout=7200, watch=False).results
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = rows_of(options.ranks, options.steps, over_ranks(results))
    print(f"{machine()}; medians of {options.rounds} blocks, in random order in each round\n")
    print(table(rows), NOTE, sep="\n\n")
    if sentence:
        print(sentence)
    if options.json:
        facts = {"machine": machine(), "rounds": options.rounds, "rows": [asdict(row) for row in rows]}
        facts["steps"] = {task: options.steps or TASKS[task].steps for task in options.tasks}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0
