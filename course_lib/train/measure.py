"""What is measured while the run runs, beside the loss."""

import importlib.util
import math
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from course_lib.train.errors import ConfigError


@dataclass(frozen=True)
class MeasureConfig:
    """None of these changes what is computed."""

    tensorboard: bool = False
    """The numbers of metrics.jsonl for TensorBoard, too, in RUN/tensorboard."""
    profile_at: int = 0
    """From this step on, record what each rank does, into RUN/traces/rank_K.json for ui.perfetto.dev. 0: never.
    Recorded steps are slower, small ones several times."""
    profile_steps: int = 3
    """How many steps are recorded."""
    peak_tflops: float = 0.0
    """What one device could compute, in 10^12 FLOP/s: then each row says which part of it was used (MFU).
    0: known for A100, H100, H200 and V100 from their data sheets, otherwise there is no MFU."""


def check(config: MeasureConfig) -> None:
    """Raise ConfigError for what cannot be measured."""
    if config.profile_at < 0:
        raise ConfigError(f"--measure.profile_at must be at least 0, but is {config.profile_at}.")
    if config.profile_steps < 1:
        raise ConfigError(f"--measure.profile_steps must be at least 1, but is {config.profile_steps}.")
    if not 0 <= config.peak_tflops < math.inf:
        raise ConfigError(f"--measure.peak_tflops must be at least 0 and finite, but is {config.peak_tflops}.")
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--measure.tensorboard needs TensorBoard, which is not installed: pip install tensorboard.")


def memory_mib(device: torch.device) -> float:
    """The most memory that this rank ever had, in MiB: of its GPU, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10  # bytes there, KiB elsewhere


FIRST, EVERY = 10, 100  # in which steps DDP reads its clocks


class Overlap:
    """How much of the communication went on behind backward, by DDP's own clocks, for the rows in which it read them.

    It reads them in its first FIRST steps and then in each EVERY-th, whether anybody asks or not, and keeps the newest.
    A row that has none of these steps gets nothing: an old number would say nothing about its steps. (What was *not*
    behind backward is known of each step, see pace.py.)
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.steps = self._log().get("iteration", 0)  # as DDP counts: with those that `wrap` throws away

    def row(self, steps: int) -> dict[str, float]:
        """{"overlap": a part of 1}, when DDP read its clocks in the last so many steps, else {}."""
        before, self.steps = self.steps, self.steps + steps
        if before >= FIRST and before // EVERY == self.steps // EVERY:
            return {}  # so most rows need not ask, which takes longer than all else that is measured
        log = self._log()
        communicated, hidden = log.get("backward_comm_time", 0), log.get("backward_compute_comm_overlap_time", 0)
        return {"overlap": hidden / communicated} if communicated and log["iteration"] > before else {}

    def _log(self) -> dict[str, Any]:
        # Both private; tests/train/test_measure.py tells when they change. By itself DDP evaluates the clocks of a step
        # in the forward of the next one, which may belong to the next row.
        self.model.logger.set_runtime_stats_and_log()
        return self.model._get_ddp_logging_data()
