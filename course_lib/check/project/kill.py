"""kill -9 of a rank in the middle of a run, from a thread beside the launch."""

import threading
from pathlib import Path
from typing import Any

from course_lib.train.metrics import read_rows
from course_lib.train.processes import kill_rank


class Killer(threading.Thread):
    """Sends SIGKILL to `rank` of the run in `path` once it has `at` rows of training; `done` tells whether it did."""

    def __init__(self, path: Path, at: int, rank: int) -> None:
        super().__init__(name="killer", daemon=True)
        self.path, self.at, self.rank = path, at, rank
        self.over, self.done = threading.Event(), False

    def run(self) -> None:
        """Look often: a step takes some milliseconds."""
        while not self.over.wait(0.01):
            if len(self.rows()) >= self.at and kill_rank(self.path, self.rank):
                self.done = True
                return

    def rows(self) -> list[dict[str, Any]]:
        """The rows of training so far."""
        return [row for row in read_rows(self.path / "metrics.jsonl") if row["event"] == "train"]

    def stop(self) -> None:
        """The launch is over."""
        self.over.set()
        self.join()
