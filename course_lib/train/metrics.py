"""metrics.jsonl: one JSON object a line. Rows: "start" (each launch), "train" and "eval"."""

import json
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends rows (rank 0).

    Rows after `step`, from a run that was killed later, are cut off at the start; but each launch stays on record.

    last  the step of the last row that was there before; None: there was none
    """

    def __init__(self, path: Path, step: int) -> None:
        found = read_rows(path)
        self.last = found[-1]["step"] if found else None
        rows = [row for row in found if row["step"] <= step or row["event"] == "start"]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.replace(path)
        self.file = path.open("a")

    def write(self, event: str, step: int, **values: Any) -> None:
        """One row, visible to readers at once."""
        self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self.file.flush()

    def settle(self) -> None:
        """Put all rows on disk: a checkpoint must not outlive the rows before it. May be called by another thread."""
        os.fsync(self.file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; a last line that was cut by a crash is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows
