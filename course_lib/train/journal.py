"""What the run leaves behind: rows, checkpoints, status, and a line on the screen now and then.

Rank 0 does it all. When the disk refuses, all ranks learn it at the same step and raise CannotWrite together: from a
row or a save in the background at the next row, from a save at once.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from course_lib.train import checkpoint
from course_lib.train.board import Board
from course_lib.train.errors import CannotWrite
from course_lib.train.folder import writing
from course_lib.train.job import Job
from course_lib.train.launches import previous
from course_lib.train.metrics import MetricsFile
from course_lib.train.pace import Suspicion
from course_lib.train.state import collect
from course_lib.train.status import write_status
from course_lib.train.stopping import DISK_TROUBLE
from course_lib.train.writer import Writer


class Journal:
    """The writer of a run folder; on all other ranks every method does nothing."""

    def __init__(self, job: Job, plan: str) -> None:
        self.job, self.active = job, job.env.first
        self.last: dict[str, Any] = {"step": job.start}
        self.printed = 0.0
        self.trouble: CannotWrite | None = None
        self.suspicion = Suspicion()
        with job.env.together(), writing("The first lines", job.folder):
            if self.active:
                self.writer = Writer(job.config.run.save_in_background)
                self.file = MetricsFile(job.folder / "metrics.jsonl", job.start)
                self.board = Board(job.config.measure.tensorboard, job.folder, job.start)
                about = {"ranks": job.env.world_size, "data": job.data.name, "note": job.data.note, "plan": plan}
                before = {} if self.file.last is None else {"previous": previous(job.folder, self.file.last)}
                self.file.write("start", job.start, time=time.time(), **about, **before)
                self._status("running")

    @property
    def code(self) -> int:
        """What the other ranks are told with each row: DISK_TROUBLE, or 0."""
        return DISK_TROUBLE if self.active and (self.trouble or self.writer.failed) else 0

    def train(self, step: int, epoch: int, lr: float, row: dict[str, float]) -> None:
        """A row of training; printed at most every two seconds and at the end of an epoch."""
        steps = step - self.last["step"]
        self.last |= {"step": step, "epoch": epoch, "loss": row["loss"]}
        if not self.active:
            return
        with self._noted():
            self.file.write("train", step, epoch=epoch, lr=lr, **row)
            self.board.write("train", step, {"lr": lr, **row})
        if slow := self.suspicion.look(row, steps):
            self.job.env.say(f"step {step}: {slow}")
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
            with self._noted():
                self.file.write("eval", step, epoch=epoch, **row)
                self.board.write("eval", step, row)
            right, samples = row["right"], row["samples"]
            self.job.env.say(f"epoch {epoch:>3}  test accuracy {row['accuracy']:.4f} ({right} of {samples})")

    def save(self, step: int, job: Job) -> None:
        """A checkpoint; the rows before it are on disk first. All ranks call it, and all wait for rank 0.

        They wait on the control group, whose patience is long: a slow disk is no reason for a time-out.
        """
        state = collect(job, step)
        with job.env.together():
            if self.active:
                self._raise_trouble()
                content = checkpoint.encode(state)
                self.writer.submit(lambda: self._write(step, content))
                with writing("status.json", job.folder):
                    self._status("running")

    def close(self, status: str, why: str) -> None:
        """The end of the run: wait for what is still being written, then say in status.json how it ended."""
        with self.job.env.together():
            if self.active:
                self.writer.wait()
                self._raise_trouble()
                with writing("status.json", self.job.folder):
                    self._status(status, why)

    def _write(self, step: int, content: memoryview) -> None:
        with writing("metrics.jsonl", self.job.folder):
            self.file.settle()
            self.board.settle()
        checkpoint.write(self.job.folder, step, content, self.job.config.run.keep)

    def _status(self, status: str, why: str = "") -> None:
        job = self.job
        more = {"steps": job.total, "ranks": job.env.world_size, "data": job.data.name, "note": job.data.note}
        write_status(job.folder, status, why, **more | self.last)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """What the disk refuses here is raised later, by all ranks."""
        try:
            with writing("metrics.jsonl", self.job.folder):
                yield
        except CannotWrite as error:
            self.trouble = self.trouble or error

    def _raise_trouble(self) -> None:
        if self.trouble:
            raise self.trouble
