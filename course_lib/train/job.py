"""All that the loop works with."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from course_lib.train import batches
from course_lib.train.average import Average
from course_lib.train.config import Config
from course_lib.train.data import Data
from course_lib.train.environment import Environment
from course_lib.train.order import Order
from course_lib.train.update import Update

Microbatch = tuple[torch.Tensor, torch.Tensor, bool]  # images, labels, and whether it is the last of its step


@dataclass
class Job:
    """Made by `prepare`. `start` steps are done already, `total` is the last step."""

    config: Config
    env: Environment
    data: Data
    module: nn.Module  # the bare network
    model: DistributedDataParallel  # the same, with gradients averaged over the ranks
    optimizer: torch.optim.Optimizer
    scaler: GradScaler  # one that does nothing without fp16
    update: Update  # from gradients to weights
    average: Average  # of the weights, or nothing
    autocast: Callable[[], AbstractContextManager]  # around each forward
    mix: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # mixup, or nothing
    part_of_peak: float | None  # that one sample a second would take of a device's peak; None: unknown
    order: Order
    start: int = 0
    total: int = 0
    folder: Path = Path()
    lock: IO[str] | None = None  # rank 0 holds it as long as the process lives

    def microbatches(self, step: int) -> int:
        """How many this rank has in a step."""
        share = len(range(self.env.rank, self.order.count(step), self.env.world_size))
        return batches.microbatches(share, self.config.data.batch)
