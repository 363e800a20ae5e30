"""metrics.jsonl: one JSON object a line. Rows: "start" (each launch), "train" and "eval"."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.train.stopping import describe


class MetricsFile:
    """Appends rows (rank 0).

    Rows after `step`, from a run that was killed later, are cut off at the start.
    """

    def __init__(self, path: Path, step: int) -> None:
        rows = [row for row in read_rows(path) if row["step"] <= step]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.replace(path)
        self.file = path.open("a")

    def write(self, event: str, step: int, **values: Any) -> None:
        """One row, visible to readers at once."""
        self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self.file.flush()

    def settle(self) -> None:
        """Put all rows on disk: a checkpoint must not outlive the rows before it."""
        self.file.flush()
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


class Meter:
    """Sums up what happened since the last row, and adds it up over the ranks with one all-reduce."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Begin a new row; the time of evaluation and saving belongs to no row."""
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.count = self.steps = 0
        self.waited = 0.0
        self.began = time.perf_counter()

    def wait(self, batches: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch, on the device; the time it took is data_wait."""
        asked = time.perf_counter()
        images, labels = next(batches)
        self.waited += time.perf_counter() - asked
        return images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def add(self, loss_sum: torch.Tensor, count: int) -> None:
        """The loss summed over the samples of this rank, and how many samples all ranks together had."""
        self.loss += loss_sum  # stays on the device: no waiting for the GPU in each step
        self.count += count
        self.steps += 1

    def reduce(self, signal_number: int, rank: int, world_size: int) -> tuple[dict[str, float], str | None]:
        """The row over all ranks, and why to stop or None: all ranks learn of a signal at the same step."""
        sums = torch.zeros(2 + world_size, dtype=torch.float64, device=self.device)
        sums[0], sums[1], sums[2 + rank] = self.loss, self.waited, signal_number
        dist.all_reduce(sums)
        loss, waited, *signals = sums.tolist()
        seconds = time.perf_counter() - self.began
        row = {
            "loss": loss / self.count,
            "samples_per_s": self.count / seconds,
            "data_wait": waited / world_size / self.steps,
        }
        return row, describe([int(number) for number in signals])
