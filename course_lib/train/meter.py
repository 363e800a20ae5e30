"""What happened since the last row of metrics.jsonl, over all ranks."""

import math
import time
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist

from course_lib.train.job import Job, Microbatch
from course_lib.train.measure import Overlap, memory_mib
from course_lib.train.pace import Pace, compare
from course_lib.train.placement import lay_out
from course_lib.train.stopping import describe


class Meter:
    """Sums up what happened since the last row, and adds it up over the ranks with one all-reduce."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, job.env.device
        self.pace, self.overlap = Pace(job.model, self.device), Overlap(job.model)
        self.restart()

    def restart(self) -> None:
        """Begin a new row; the time of evaluation and saving belongs to no row."""
        self.losses: list[list[torch.Tensor]] = []  # of each step, of each microbatch
        self.norm: torch.Tensor | None = None
        self.count = 0
        self.waited = 0.0
        self.began = time.perf_counter()

    def fetch(self, batches: Iterator, number: int) -> Iterator[Microbatch]:
        """The next `number` microbatches, on the device; the time that they took is data_wait."""
        for part in range(1, number + 1):
            asked = time.perf_counter()
            images, labels = next(batches)
            self.waited += time.perf_counter() - asked
            images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            yield lay_out(images, self.job.config.model), labels, part == number

    def add(self, losses: list[torch.Tensor], count: int, norm: torch.Tensor | None = None) -> None:
        """A step: the sums of losses of this rank's microbatches, how many samples all ranks had, the gradients' norm.

        They stay on the device until there is a row: no waiting for the GPU in each step.
        """
        self.losses.append(losses)
        self.count += count
        self.norm = norm

    def reduce(self, code: int) -> tuple[dict[str, float], str | None]:
        """The row over all ranks, and why to stop or None: all ranks learn of a signal at the same step.

        `code` is what this rank has to say about stopping, see `stopping`. Sums, and a place for each rank's numbers.
        """
        env, steps = self.job.env, len(self.losses)
        loss = torch.stack(list(chain(*self.losses))).sum(dtype=torch.float64).item()
        own, exposed = self.pace.seconds()
        sums = [0.0] * (3 + 3 * env.world_size)
        sums[:3] = loss, self.waited, exposed
        sums[3 + env.rank :: env.world_size] = code, memory_mib(self.device), (self.waited + own) / steps
        everywhere = torch.tensor(sums, dtype=torch.float64, device=self.device)
        dist.all_reduce(everywhere)
        loss, waited, exposed, *of_ranks = everywhere.tolist()
        codes, memory, paces = (of_ranks[i * env.world_size : (i + 1) * env.world_size] for i in range(3))
        seconds = time.perf_counter() - self.began
        row = {
            "loss": loss / self.count,
            "grad_norm": self.norm.item(),
            "samples_per_s": self.count / seconds,
            "data_wait": waited / env.world_size / steps,
            "memory_mib": max(memory),
            "comm_share": min(exposed / env.world_size / seconds, 1.0),
            **self.overlap.row(steps),
            **compare(paces),
        }
        if self.job.part_of_peak:
            row["mfu"] = self.job.part_of_peak * row["samples_per_s"] / env.world_size
        if self.job.scaler.is_enabled():
            row |= {"loss_scale": self.job.scaler.get_scale(), "skipped": self.job.update.skipped}
        return row, describe([int(code) for code in codes])

    def first_nan(self, step: int) -> tuple[int, str]:
        """After a loss that is not finite: the first step of this row with one, and in words which ranks had it.

        `step` is the last of the row. All ranks call this, when `reduce` has told all of them the same.
        """
        env, steps = self.job.env, len(self.losses)
        bad = [place for place, losses in enumerate(self.losses) if not math.isfinite(sum(losses))]
        places = torch.full((env.world_size,), steps, dtype=torch.int64, device=self.device)
        places[env.rank] = min(bad, default=steps)
        dist.all_reduce(places, op=dist.ReduceOp.MIN)
        first = int(places.min())
        ranks = [str(rank) for rank, place in enumerate(places.tolist()) if place == first]
        if first == steps:  # each step's loss is a number; only their sum is none
            return step, ""
        words = "" if env.world_size == 1 else f"it began on rank {' and '.join(ranks)}; "
        return step - steps + 1 + first, words
