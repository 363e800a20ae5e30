"""A run folder as `course report` reads it: also one that is damaged, or that somebody is writing into right now."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.train.folder import is_locked
from course_lib.train.record import TrainRun
from course_lib.train.status import outcome, read_status

Series = list[tuple[int, float]]  # (step, value)


class NoRun(Exception):
    """There is nothing to report about: one full sentence."""


@dataclass
class Seen:
    """A run and what was odd when its folder was read, in sentences."""

    run: TrainRun
    warnings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.run.dir.resolve().name

    @property
    def ranks(self) -> int:
        """Of the newest launch; 0 when it is not recorded."""
        return whole(self.run.facts.get("ranks"))

    @property
    def total(self) -> int:
        """The steps of the whole run; 0 when they are not recorded."""
        return whole(self.run.facts.get("steps"))

    @property
    def data(self) -> dict[str, Any]:
        """What config.json says about the data."""
        return self.run.facts["data"] if isinstance(self.run.facts.get("data"), dict) else {}

    @property
    def step(self) -> int:
        """The last step that is known."""
        rows = self.run.rows("train")
        return max(whole(self.run.details.get("step")), rows[-1]["step"] if rows else 0)

    def option(self, name: str) -> Any:
        """One option, for example "optim.lr"; None when config.json has none of that name."""
        part, _, key = name.partition(".")
        return self.run.config.get(part, {}).get(key)

    def series(self, key: str, event: str = "train") -> Series:
        """One number over the steps, from the rows that have it."""
        return [(row["step"], float(row[key])) for row in self.run.rows(event) if is_number(row.get(key))]

    def middle(self, key: str) -> float | None:
        """The median over all training rows; None when no row has a finite one."""
        return middle([value for _, value in self.series(key)])


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold; true and false are none."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def whole(value: Any) -> int:
    """A whole number of at least 0; 0 for everything else."""
    return value if isinstance(value, int) and is_number(value) and value > 0 else 0


def middle(values: list[float]) -> float | None:
    """The median of the finite ones."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def read_run(folder: Path) -> Seen:
    """Read it as far as it can be read; raises NoRun when config.json does not tell what was run."""
    if not folder.exists():
        raise NoRun(f"There is no folder {folder}.")
    if not folder.is_dir() or not (folder / "config.json").exists():
        what = "is no folder" if not folder.is_dir() else "holds no run: there is no config.json in it"
        raise NoRun(f"{folder} {what}. Name the folder of a training run (--run.dir).")
    try:
        facts = json.loads((folder / "config.json").read_text())
        if not all(isinstance(options, dict) for options in facts["config"].values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoRun(f"{folder / 'config.json'} cannot be read as the configuration of a run.") from error
    seen = Seen(TrainRun(folder, facts["config"], facts))
    seen.run.metrics = _rows(folder / "metrics.jsonl", seen.warnings)
    _status(seen)
    return seen


def _rows(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """The rows that are whole; how many lines are not goes into `warnings`."""
    if not path.exists():
        warnings.append("There is no metrics.jsonl: nothing was measured yet, or somebody removed it.")
        return []
    *lines, last = path.read_bytes().split(b"\n")
    rows = [_row(line) for line in lines]
    if bad := rows.count(None):
        warnings.append(f"metrics.jsonl: {bad} of {len(rows)} lines cannot be read and are left out.")
    if last:  # without its end: a rank is writing it, or was killed while it did
        warnings.append("metrics.jsonl: the last line is only half written and is left out.")
    return [row for row in rows if row]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        step = row["step"]
        return row if isinstance(row["event"], str) and (step == 0 or whole(step)) else None
    except (ValueError, KeyError, TypeError):
        return None


def _status(seen: Seen) -> None:
    """What status.json says, and whether the processes are still there."""
    run = seen.run
    run.details = read_status(run.dir)
    if not run.details:
        seen.warnings.append("There is no status.json: the launch ended before its first step, or has just begun.")
    if run.details.get("status") == "unknown":
        seen.warnings.append("status.json cannot be read, so how the run ended is not known.")
    run.status, run.why = outcome(run.details, at_work=lambda: _at_work(seen))


def _at_work(seen: Seen) -> bool:
    try:
        return is_locked(seen.run.dir)
    except OSError:  # a folder that may only be read: nobody knows
        seen.warnings.append("Whether the run is still at work cannot be seen: its lock may not be opened.")
        return True
