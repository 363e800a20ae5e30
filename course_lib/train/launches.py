"""The launches of a run: when each began and how it ended, from the "start" rows of metrics.jsonl.

A launch that is killed cannot say so. So each one notes in its start row how the one before it ended: it holds the lock
of the folder by then, and so knows that nobody else is at work.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.train.status import outcome, read_status


@dataclass(frozen=True)
class Launch:
    """One start of a run, also one by torchrun itself after a rank had died.

    began, ended   seconds since 1970, None where not recorded; a launch that was killed or still runs has not ended,
                   and this is when it last wrote status.json
    first          the step that it went on from; 0: it began at the beginning
    last           the last step that it wrote a row for, even if a later launch went on from an earlier one
    ranks          how many
    status, why    "finished", "stopped", "failed", "killed", "running", or "unknown" where it is not recorded; and why
    """

    began: float | None
    ended: float | None
    first: int
    last: int
    ranks: int
    status: str
    why: str


def previous(folder: Path, last: int) -> dict[str, Any]:
    """How the launch before this one ended, for this one's start row; the last row of that launch was of step `last`.

    To be asked by a launch that holds the lock, before it writes status.json.
    """
    details = read_status(folder)
    status, why = outcome(details, at_work=lambda: False)
    return {"status": status, "why": why, "step": last, "time": details.get("time")}


def launches(rows: Iterable[dict[str, Any]], newest: dict[str, Any]) -> list[Launch]:
    """All launches, the oldest first, from the rows of metrics.jsonl; `newest` is of the last one, as `previous` is.

    >>> rows = [{"event": "start", "step": 0, "time": 5.0, "ranks": 2},
    ...         {"event": "start", "step": 3, "time": 9.0, "ranks": 1, "previous": {"status": "killed", "step": 4}}]
    >>> [(launch.began, launch.first, launch.last, launch.status) for launch in launches(rows, {"status": "running"})]
    [(5.0, 0, 4, 'killed'), (9.0, 3, 3, 'running')]
    """
    starts = [row for row in rows if row["event"] == "start"]
    ends = [*(row.get("previous") for row in starts[1:]), newest]
    return [_launch(start, end if isinstance(end, dict) else {}) for start, end in zip(starts, ends, strict=False)]


def _launch(start: dict[str, Any], end: dict[str, Any]) -> Launch:
    return Launch(
        start.get("time"), end.get("time"), start["step"], end.get("step", start["step"]), start.get("ranks", 0),
        str(end.get("status", "unknown")), str(end.get("why", "")),
    )  # fmt: skip
