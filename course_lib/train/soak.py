"""`course soak`: kills a training run again and again, at random moments, and looks whether its promises hold.

Promised is: no checkpoint is ever damaged; nothing older than the newest one is ever gone back to; and at the end all
bits are those of a run that nobody touched. The seed decides who is killed and when; how far a run has come by then
depends on the machine.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from course_lib.train.soak_rounds import Soak


def main(argv: list[str]) -> int:
    """0: all promises were kept; 1: one was not; 2: what was asked for makes no sense."""
    args = _parse(argv)
    if args.dir and args.dir.exists() and any(args.dir.iterdir()):
        print(f"--dir {args.dir} is not empty; name a new folder.", file=sys.stderr)
        return 2
    folder = args.dir or Path(tempfile.mkdtemp(prefix="course-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder.absolute(), args.ranks, args.epochs, args.seed, args.kills, "torchrun" if args.plain else "auto")
    progress = Progress(soak, args.kills)
    soak.tick = progress.show
    until = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    try:
        soak.straight()
        while soak.harm.left > 0 and soak.found.kept and time.monotonic() < until:
            soak.round()
    finally:  # an interrupt, too, ends with what was found by then
        progress.end()
        print(report(soak, args, progress.seconds), flush=True)
        if soak.found.kept and not args.dir:
            shutil.rmtree(folder)
    if soak.found.kept:
        return 0
    print(f"A promise is broken. All runs and what they printed are in {folder}.")
    return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="course soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=_positive, default=200, help="how often somebody is killed (200)")
    parser.add_argument("--ranks", type=_positive, default=3, help="of each launch (3: with two, sums have no order)")
    parser.add_argument("--epochs", type=_positive, default=10, help="of each run, 12 steps each (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the choices, and of the run itself (0)")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no new run after so many (0: no limit)")
    parser.add_argument("--plain", action="store_true", help="plain torchrun, which needs ten seconds a start, not one")
    parser.add_argument("--dir", type=Path, help="keep all runs in this new folder")
    return parser.parse_args(argv)


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {word!r}")
    return int(word)


class Progress:
    """One line on a terminal, kept up to date; elsewhere a line now and then."""

    def __init__(self, soak: Soak, kills: int) -> None:
        self.soak, self.kills, self.began, self.last = soak, kills, time.monotonic(), 0.0
        self.terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    def show(self) -> None:
        """Called several times a second."""
        if time.monotonic() - self.last < (0.5 if self.terminal else 30):
            return
        self.last = time.monotonic()
        harm, found = self.soak.harm, self.soak.found
        line = f"{harm.kills} of {self.kills} kills, run {found.rounds}, launch {found.launches}, {self.seconds:.0f} s"
        print(f"\r{line}\033[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line alone."""
        if self.terminal:
            print(file=sys.stderr)


def report(soak: Soak, args: argparse.Namespace, seconds: float) -> str:
    """What was done and what was found, as a table."""
    harm, found = soak.harm, soak.found
    kinds = ", ".join(f"{number} of {who}" for who, number in sorted(harm.who.items()))
    times = ", ".join(f"{number} {when}" for when, number in sorted(harm.when.items()))
    rows = [
        ("kills", f"{harm.kills}", f"{kinds}; {times}"),
        ("launches", f"{found.launches}", f"of {found.rounds} runs, {args.ranks} ranks each, in {seconds:.0f} s"),
        ("checkpoints looked at", f"{found.looked_at}", ""),
        ("corrupt checkpoints", f"{len(found.corrupt)}", "; ".join(found.corrupt)),
        ("steps lost beyond the last checkpoint", f"{found.lost}", ""),
        ("launches that hung", f"{found.hung}", ""),
        ("launches that failed by themselves", f"{len(found.failed)}", "; ".join(found.failed)),
        ("final bits equal", "no" if found.unequal else "yes" if found.kept else "unknown", "; ".join(found.unequal)),
    ]
    how = "plain torchrun" if args.plain else "torchrun, forked where that is safe"
    head = (
        f"course soak --kills {args.kills} --seed {args.seed}: {how}; {platform.machine()}, {os.cpu_count()} CPU cores"
    )
    lines = [f"{head}, torch {torch.__version__}"]
    return "\n".join(lines + [f"  {name:<38}{value:>7}  {more}".rstrip() for name, value, more in rows])
