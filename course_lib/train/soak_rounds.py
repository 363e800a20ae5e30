"""Rounds of `course soak`: a run is killed again and again until it is done, and compared with one left alone."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from course_lib.launch import torchrun
from course_lib.launch.supervise import supervisor
from course_lib.train.checkpoint import decode, newest_valid, saved
from course_lib.train.manifest import Damaged, read
from course_lib.train.metrics import read_rows
from course_lib.train.record import TrainRun
from course_lib.train.soak_kills import Harm, Killer, newest

# What makes a resume hard and costs little, and a checkpoint every third step; 12 steps an epoch.
NETWORK = ["--model.width", "4", "--model.norm", "batch", "--model.dropout", "0.3", "--amp.dtype", "bf16"]
HARD = ["digits", *NETWORK, "--data.global_batch", "120", "--run.save_every", "3", "--run.keep", "3"]
SAME = ("step", "loss", "grad_norm", "lr")
LONGEST = 180.0  # seconds of a launch; it should need a few


@dataclass
class Found:
    """What the soak found out; the promises are those that must stay empty, 0 or equal."""

    launches: int = 0
    rounds: int = 0
    looked_at: int = 0  # checkpoints, after each launch
    corrupt: list[str] = field(default_factory=list)
    lost: int = 0  # steps beyond the last checkpoint
    hung: int = 0
    failed: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether all promises were kept."""
        return not (self.corrupt or self.lost or self.hung or self.failed or self.unequal)


class Soak:
    """Its rounds. `start` is that of `course_lib.launch.torchrun`; `tick` is called while a launch goes on."""

    def __init__(self, folder: Path, ranks: int, epochs: int, seed: int, kills: int, start: str) -> None:
        self.folder, self.ranks, self.start = folder, ranks, start
        self.words = [*HARD, "--optim.epochs", str(epochs), "--run.seed", str(seed)]
        self.chance = random.Random(seed)
        self.harm, self.found = Harm(kills), Found()
        self.tick: Callable[[], None] = lambda: None

    def straight(self) -> None:
        """The run that nobody kills."""
        self._launch(self.folder / "straight", harmless=True)

    def round(self) -> None:
        """One run until it is finished, through all kills; with no kill left it is left alone."""
        self.found.rounds += 1
        folder = self.folder / f"round_{self.found.rounds}"
        log = Starts(folder)
        while self.found.kept:
            self._launch(folder, log=log)
            self._look_at_checkpoints(folder)
            if finished(folder):
                break
        self.found.lost += log.lost
        if self.found.kept:
            self.found.unequal += differences(self.folder / "straight", folder)

    def _launch(self, folder: Path, log: "Starts | None" = None, harmless: bool = False) -> None:
        """One torchrun, until it ends or is killed."""
        self.found.launches += 1
        more = [] if harmless else self.chance.choice([[], ["--run.save_in_background"], ["--data.workers", "1"]])
        output = self.folder / "output" / f"launch_{self.found.launches}.log"
        output.parent.mkdir(exist_ok=True)
        killer, kills = None, self.harm.kills
        if not harmless:
            killer = Killer(folder, supervisor().agent, self.chance, self.harm, before=log.note)
            killer.start()
        try:
            words = ["-m", "course_lib.train", *self.words, *more, "--run.dir", str(folder)]
            code = torchrun(
                words, ranks=self.ranks, log=output, timeout=LONGEST, on_tick=self.tick, start=self.start,
                restarts=0 if harmless else 1000, module="course_lib.train.warm",
            )  # fmt: skip
        except TimeoutError:
            self.found.hung += 1
            return
        finally:
            if killer:
                killer.stop()
                log.note()
        if code and self.harm.kills == kills:  # nobody was killed
            self.found.failed.append(f"{output} ended with {code}")

    def _look_at_checkpoints(self, folder: Path) -> None:
        """Nobody writes now, so all that bears the name of a checkpoint must be whole."""
        for path in saved(folder):
            self.found.looked_at += 1
            try:
                decode(read(path)["state.pt"])
            except Damaged as damage:
                self.found.corrupt.append(f"{path}: {damage}")


class Starts:
    """Each start of a run must go on from the newest checkpoint that there was at the kill before, or a newer one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen, self.least, self.lost = folder, 0, 0, 0

    def note(self) -> None:
        """Called right before each kill, and after each launch."""
        starts = [row["step"] for row in read_rows(self.folder / "metrics.jsonl") if row["event"] == "start"]
        for step in starts[self.seen :]:
            self.lost += max(0, self.least - step)
        self.seen, self.least = len(starts), newest(self.folder)


def finished(folder: Path) -> bool:
    """Whether all steps are done."""
    return (folder / "config.json").exists() and TrainRun.read(folder).status == "finished"


def differences(straight: Path, hurt: Path) -> list[str]:
    """In what the two runs differ; nothing, when all rows and all bits of the last checkpoint are the same."""
    rows = [[[row[key] for key in SAME] for row in TrainRun.read(run).rows("train")] for run in (straight, hurt)]
    found = [f"{hurt}: the rows of metrics.jsonl"] if rows[0] != rows[1] else []
    states = [decode(newest_valid(run, lambda text: print(text, file=sys.stderr))) for run in (straight, hurt)]
    return found + [f"{hurt}: {key}" for key in states[0] if not equal_bits(states[0][key], states[1].get(key))]


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two nested states are the same to the last bit.

    >>> equal_bits({"w": [torch.ones(1)]}, {"w": [torch.ones(1)]}), equal_bits({"w": 1}, {"w": 2})
    (True, False)
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b
