"""What the run leaves behind: rows, checkpoints, status, and a line on the screen now and then.

Rank 0 does it all.
"""

import time
from typing import Any

from course_lib.train import checkpoint
from course_lib.train.board import Board
from course_lib.train.job import Job
from course_lib.train.metrics import MetricsFile
from course_lib.train.state import collect
from course_lib.train.status import write_status


class Journal:
    """The writer of a run folder; on all other ranks every method does nothing."""

    def __init__(self, job: Job) -> None:
        self.job, self.active = job, job.env.first
        self.last: dict[str, Any] = {"step": job.start}
        self.printed = 0.0
        if self.active:
            self.file = MetricsFile(job.folder / "metrics.jsonl", job.start)
            self.board = Board(job.config.measure.tensorboard, job.folder, job.start)
            self.file.write("start", job.start, ranks=job.env.world_size, data=job.data.name, note=job.data.note)
            self.status("running")

    def status(self, status: str, why: str = "") -> None:
        """Write status.json."""
        if self.active:
            job = self.job
            more = {
                "steps": job.total,
                "ranks": job.env.world_size,
                "data": job.data.name,
                "note": job.data.note,
            }
            write_status(job.folder, status, why, **more | self.last)

    def train(self, step: int, epoch: int, lr: float, row: dict[str, float]) -> None:
        """A row of training; printed at most every two seconds and at the end of an epoch."""
        self.last |= {"step": step, "epoch": epoch, "loss": row["loss"]}
        if not self.active:
            return
        self.file.write("train", step, epoch=epoch, lr=lr, **row)
        self.board.write("train", step, {"lr": lr, **row})
        now = time.monotonic()
        if now - self.printed >= 2 or step % self.job.order.per_epoch == 0:
            self.printed = now
            self.job.env.say(
                f"epoch {epoch:>3}  step {step:>6}/{self.job.total}  loss {row['loss']:.4f}  lr {lr:.4f}  "
                f"{row['samples_per_s']:,.0f} samples/s"
            )

    def eval(self, step: int, epoch: int, row: dict[str, float]) -> None:
        """A row of evaluation."""
        self.last |= {"accuracy": row["accuracy"]}
        if self.active:
            self.file.write("eval", step, epoch=epoch, **row)
            self.board.write("eval", step, row)
            right, samples = row["right"], row["samples"]
            self.job.env.say(f"epoch {epoch:>3}  test accuracy {row['accuracy']:.4f} ({right} of {samples})")

    def save(self, step: int, job: Job) -> None:
        """A checkpoint; the rows before it are on disk first."""
        state = collect(job, step)
        if self.active:
            self.file.settle()
            self.board.settle()
            checkpoint.save(job.folder, state, job.config.run.keep)
            self.status("running")
