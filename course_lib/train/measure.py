"""What is measured while the run runs, beside the loss."""

import importlib.util
import math
import resource
import sys
from dataclasses import dataclass

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


def communication(model: DistributedDataParallel, seconds: float) -> dict[str, float]:
    """What a rank's all-reduces cost, from DDP's own clocks; {} before they ran. `seconds` is those of a step.

    comm_share   part of the step in which backward had nothing left to do but wait for its all-reduces
    overlap      part of the communication that went on behind backward

    A communication includes the wait for the slowest rank. DDP looks at its clocks in its first ten steps and then in
    each hundredth, whether anybody asks or not, so this is of the newest of these, and asking costs some microseconds.
    """
    log = model._get_ddp_logging_data()  # private; tests/train/test_measure.py tells when it changes
    communicated, hidden = log.get("backward_comm_time", 0), log.get("backward_compute_comm_overlap_time", 0)
    if not communicated or not seconds:
        return {}
    exposed = max(communicated - hidden, 0) * 1e-9
    return {"comm_share": min(exposed / seconds, 1.0), "overlap": hidden / communicated}
