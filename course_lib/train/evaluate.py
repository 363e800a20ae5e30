"""Exact evaluation: every test sample counts once, whatever the number of ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.parallel.ddp import sync_buffers


@torch.no_grad()
def count(
    module: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> torch.Tensor:
    """What this rank counted: (right, samples, sum of losses), float64, exact for counts up to 2**53."""
    dtype = next(module.parameters()).dtype
    counted = torch.zeros(3, dtype=torch.float64, device=device)
    training = module.training
    module.eval()
    for images, labels in batches:
        labels = labels.to(device)
        scores = module(images.to(device, dtype))
        right = (scores.argmax(1) == labels).sum()
        loss = F.cross_entropy(scores.double(), labels, reduction="sum")
        counted += torch.stack([right.double(), torch.tensor(len(labels), device=device).double(), loss])
    module.train(training)
    return counted


def evaluate(
    module: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> dict[str, float]:
    """Accuracy and mean loss over the shares of all ranks.

    `module` is the bare network, not DDP's wrapper: ranks may have unequal numbers of batches, and the
    wrapper would wait for the others in each forward. Counts are added up, never averages of averages.
    """
    sync_buffers(module)
    counted = count(module, batches, device)
    dist.all_reduce(counted)
    right, samples, loss = counted.tolist()
    return {
        "accuracy": right / samples,
        "eval_loss": loss / samples,
        "right": int(right),
        "samples": int(samples),
    }
