"""The files of a run folder, read with suspicion: sizes first, then types. CheckFailed "odd_file" for what is odd."""

import json
import math
import stat
from pathlib import Path
from typing import Any

from course_lib.check.verdict import CheckFailed

MEGABYTE = 2**20
START = "To start it anew, remove the folder and train again with --run.dir {name}."


def content(path: Path, name: str, limit: int) -> bytes:
    """A file of a run folder. Raises CheckFailed for what is no ordinary file, or larger than `limit` bytes."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckFailed(f"{name}: {path.name} is a link, a folder or a device, not a file.", "odd_file")
        if found.st_size > limit:
            size, most = found.st_size / MEGABYTE, limit // MEGABYTE
            raise CheckFailed(f"{name}: {path.name} has {size:,.0f} MiB; the judge reads {most} at most.", "odd_file")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckFailed(f"{name}: {path.name} is missing. {START.format(name=name)}", "odd_file") from None
    except OSError as problem:
        raise CheckFailed(f"{name}: {path.name} cannot be read ({problem.strerror}).", "odd_file") from None


def odd(name: str, file: str, what: str) -> CheckFailed:
    """The exception for a file that training never writes like this."""
    text = f"{name}: {file} is not what training writes: {what}. {START.format(name=name)}"
    return CheckFailed(text, "odd_file")


def as_dict(value: Any) -> dict[str, Any]:
    """The value when it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no bool."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number larger than any float
        return False


def json_object(path: Path, name: str, file: str) -> dict[str, Any]:
    """What a JSON file of the run folder holds."""
    try:
        found = _plain(json.loads(content(path / file, name, MEGABYTE)))
    except (ValueError, RecursionError):
        raise odd(name, file, "it is no JSON") from None
    if not isinstance(found, dict):
        raise odd(name, file, "it is no JSON object")
    return found


def _plain(found: Any) -> Any:
    """The same. Raises ValueError when it has text that cannot be printed: half a character."""
    json.dumps(found, ensure_ascii=False).encode()
    return found


def metrics_rows(path: Path, name: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. Each has an event and a step, and a loss or an accuracy where it is about that."""
    rows, last, wanted = [], 0, {"train": "loss", "eval": "accuracy"}
    for number, line in enumerate(content(path / "metrics.jsonl", name, 64 * MEGABYTE).splitlines(), 1):
        try:
            row = _plain(json.loads(line))
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("event"), str) or not isinstance(row.get("step"), int):
            raise odd(name, "metrics.jsonl", f"line {number} is no row with an event and a step")
        value = wanted.get(row["event"])
        if value and not is_number(row.get(value)):
            raise odd(name, "metrics.jsonl", f"line {number} has the {value} {str(row.get(value))[:40]!r}")
        if value and row["step"] < last:
            raise odd(name, "metrics.jsonl", f"line {number} goes back from step {last} to step {row['step']}")
        last = row["step"] if value else last
        rows.append(row)
    return rows
