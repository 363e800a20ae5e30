"""ZeRO, stage 1: every rank keeps the optimizer's state of one part of the weights only.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1. With
N ranks a rank's state shrinks to 1/N. A reduce-scatter and an all-gather of the weights' size send together what one
ring all-reduce sends, so no byte more is sent than by data parallelism (section 7 counts them).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ZeroOne:
    """An optimizer over ranks. Made by all ranks of `group` together, from equal weights.

    parameters   those that require a gradient are trained; all of one dtype on one device
    optimizer    a class of torch.optim that treats each number by itself (SGD, Adam, AdamW; not LARS, Muon, LBFGS)
    options      its options, the same for all parameters

    Parameters become views of one flat buffer, [parts of all ranks, side by side] = [N * length], with zeros at the
    end so that N divides it. `part`, [length], is the optimizer's only parameter: a copy of this rank's slice. (In
    mixed precision that copy is the float32 one.)

        loss.backward()      # each rank on its own samples; no DDP around the model
        zero.step()          # averages the gradients, updates all weights on all ranks
        zero.zero_grad()

    A parameter without a gradient counts as one whose gradient is zero, so that ranks never wait for each other.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: type[torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        _check(self.parameters)
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.sizes = [p.numel() for p in self.parameters]
        self.length = -(-sum(self.sizes) // self.ranks)  # of a part, rounded up
        with torch.no_grad():
            self.flat = self._flatten(self.parameters)
            for p, values in zip(self.parameters, self.flat.split(self._split()), strict=False):
                p.data = values.view_as(p)
            self.part = nn.Parameter(self.flat.view(self.ranks, self.length)[self.rank].clone())
        self.part.grad = torch.zeros_like(self.part)
        self.optimizer = optimizer([self.part], **options)

    def step(self) -> None:
        """Reduce-scatter the gradients, update this rank's part, all-gather the weights."""
        gradients = self._flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        dist.reduce_scatter_single(self.part.grad, gradients, group=self.group)
        self.part.grad /= self.ranks
        self.optimizer.step()
        dist.all_gather_single(self.flat, self.part.detach(), group=self.group)

    def zero_grad(self) -> None:
        """Let go of the model's gradients."""
        for p in self.parameters:
            p.grad = None

    def state_bytes(self) -> int:
        """Bytes of what the optimizer keeps for each number of this rank's part; 0 before the first step."""
        kept = [
            t for t in self.optimizer.state[self.part].values() if torch.is_tensor(t) and t.shape == self.part.shape
        ]
        return sum(t.numel() * t.element_size() for t in kept)

    def _flatten(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """[N * length]: all tensors one after the other, then zeros."""
        zeros = tensors[0].new_zeros(self._split()[-1])
        return torch.cat([*(t.reshape(-1) for t in tensors), zeros])

    def _split(self) -> list[int]:
        return [*self.sizes, self.ranks * self.length - sum(self.sizes)]


def _check(parameters: list[nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("No parameter requires a gradient, so there is nothing to train.")
    kinds = sorted({f"{p.dtype} on {p.device}" for p in parameters})
    if len(kinds) > 1:
        raise ValueError(f"One flat buffer holds one dtype on one device, but the parameters are {', '.join(kinds)}.")
