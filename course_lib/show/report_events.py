"""What happened to a run: launches, stalls, warnings, its end; and the checkpoints that are there now."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.show.report_read import Seen, is_number, whole
from course_lib.train.checkpoint import saved, step_of
from course_lib.train.flight import who_is_missing
from course_lib.train.manifest import Damaged, read
from course_lib.train.pace import Suspicion


@dataclass(frozen=True)
class Event:
    """After which step, what kind, what in words."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Kept:
    """A checkpoint: its step, bytes of all its files, and what is wrong with it (empty: whole by its manifest)."""

    step: int
    size: int
    damage: str


def resumes(seen: Seen) -> list[int]:
    """The steps after which a launch went on, each once, for the curves."""
    return sorted({row["step"] for row in seen.run.rows("start") if row["step"] > 0})


def events(seen: Seen) -> list[Event]:
    """By step, and within a step as they happened."""
    found = [*_launches(seen), *_stalls(seen), *_slow(seen), *_skipped(seen)]
    found.sort(key=lambda event: event.step)
    if seen.data.get("note"):
        found.insert(0, Event(0, "warning", str(seen.data["note"])))
    found += [Event(seen.step, "warning", text) for text in seen.warnings]
    if seen.run.status != "running":
        found.append(Event(seen.step, seen.run.status, (seen.run.why or "all steps are done") + _moment(seen)))
    return found


def _moment(seen: Seen) -> str:
    """When status.json was written, in UTC; a killed process wrote it before."""
    at = utc(seen.run.details.get("time"))
    return f" ({'its last word: ' * (seen.run.status == 'killed')}{at} UTC)" if at else ""


def utc(at: Any) -> str:
    """A moment, given in seconds since 1970; empty for what is none.

    >>> utc(1e9), utc("today")
    ('2001-09-09 01:46:40', '')
    """
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if is_number(at) and 0 < at < 4e9 else ""


def _launches(seen: Seen) -> list[Event]:
    found = []
    for number, row in enumerate(seen.run.rows("start")):
        number_of = whole(row.get("ranks"))
        ranks = f"{number_of or 'an unknown number of'} {'rank' if number_of == 1 else 'ranks'}"
        if row["step"] > 0:
            text = f"went on from the checkpoint of this step on {ranks}"
            found.append(Event(row["step"], "resume", text))
        else:
            again = ", again from the beginning: no checkpoint was there yet" if number else ""
            found.append(Event(0, "restart" if number else "start", f"{ranks}{again}"))
    return found


def _stalls(seen: Seen) -> list[Event]:
    found = []
    for place in sorted((seen.run.dir / "stalls").glob("step_*")):
        number = place.name.removeprefix("step_")
        if place.is_dir() and number.isdecimal():
            text = f"no step ended any more: {_missing(place, seen.ranks)}; see stalls/{place.name}"
            found.append(Event(int(number), "stall", text))
    return found


def _missing(place: Path, ranks: int) -> str:
    try:
        return who_is_missing(place, ranks)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "what the ranks recorded cannot be read"


def _slow(seen: Seen) -> list[Event]:
    """What the run said about slow ranks; it is worked out again from the rows."""
    found, last, suspicion = [], 0, Suspicion()
    for row in seen.run.metrics:
        if row["event"] == "start":
            last, suspicion = row["step"], Suspicion()
        if row["event"] != "train":
            continue
        steps, last = row["step"] - last, row["step"]
        whole_row = all(is_number(row.get(key)) for key in ("slowest_rank", "slowest_s", "others_s"))
        if whole_row and (text := suspicion.look(row, steps)):
            found.append(Event(row["step"], "warning", text))
    return found


def _skipped(seen: Seen) -> list[Event]:
    """Steps that the loss scaler left out, because gradients were no numbers."""
    steps = [step for step, value in seen.series("skipped") if value]
    if not steps:
        return []
    most = max(value for _, value in seen.series("skipped"))
    return [Event(steps[0], "warning", f"gradients overflowed: {most:.0f} steps were left out by the loss scaler")]


def kept(folder: Path) -> list[Kept]:
    """All checkpoints that are there, oldest first; each is read as a whole and compared with its manifest."""
    found = []
    for path in saved(folder):
        damage = ""
        try:
            read(path)
        except Damaged as reason:
            damage = str(reason)
        if path.exists():  # else the run has just removed it, to keep newer ones
            size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            found.append(Kept(step_of(path), size, damage))
    return found
