"""torch's DistributedDataParallel, wrapped so that a run is the same run after a restart."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap(module: nn.Module, example: torch.Tensor) -> DistributedDataParallel:
    """Wrap a module that is already on its device; `example` is a batch of the right shape, dtype and device.

    Parameters and buffers of rank 0 go to all ranks, so ranks that were built differently become equal. Move
    the module and change its dtype *before*: afterwards DDP's hooks sit on parameters that no longer exist,
    and gradients are silently not averaged.
    """
    device = example.device
    model = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)
    settle_buckets(model, example)
    return model


def settle_buckets(model: DistributedDataParallel, example: torch.Tensor) -> None:
    """One forward and backward whose result is thrown away.

    DDP learns in its first backward in which order gradients arrive and groups them into other buckets from
    then on. With three or more ranks another bucket means another order of additions, so the first step after
    a restart would differ in its last bits from the same step of a straight run. After this call every step
    is an ordinary one. Evaluation mode: BatchNorm statistics and dropout's random numbers stay untouched.
    """
    training = model.training
    model.eval()
    (model(torch.zeros_like(example)).sum() * 0).backward()
    model.zero_grad(set_to_none=True)
    model.train(training)


@torch.no_grad()
def sync_buffers(module: nn.Module) -> None:
    """Give all ranks the buffers (BatchNorm's statistics) of rank 0, as DDP does before a training forward.

    Each rank updated its own from its own samples; without this each would evaluate another model.
    """
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def gradient_bytes(module: nn.Module) -> int:
    """Bytes that an all-reduce of all gradients carries.

    What each step sends through the ring, before 2(N-1)/N.
    """
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
