"""Tensor parallelism: two Linear layers cut so that a forward needs one all-reduce, and a backward one.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv:1909.08053, 2019, section 3. The first layer is cut by outputs, the second by inputs, so the activation between
them, which acts on each number by itself, needs no communication.

All ranks have the same input and compute the same loss; each holds its part of both weights.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class CopyIn(torch.autograd.Function):
    """The paper's f: forward passes the input on, backward adds up what all ranks say about it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """x, of any shape, as it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum over ranks, of the shape of x."""
        return _sum(gradient, ctx.group), None


class SumOut(torch.autograd.Function):
    """The paper's g: forward adds up the parts of all ranks, backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The sum over ranks, of the shape of `part`."""
        return _sum(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is: each part went into the sum once. (All ranks have the same loss.)"""
        return gradient, None


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def share(features: int, group: dist.ProcessGroup | None = None) -> slice:
    """Which of `features` are this rank's. Where they do not divide, the first ranks have one more than the last.

    A ValueError if a rank would have none.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if features < ranks:
        raise ValueError(f"{features} features cannot be cut into {ranks} parts, one for each rank.")
    each, more = divmod(features, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


class ColumnParallelLinear(nn.Module):
    """`whole`, cut by outputs: [..., inputs] → [..., this rank's outputs].

    In the paper's x A the weight A is [inputs, outputs] and its columns are cut; torch keeps the transpose, so here
    rows. `whole` has the same values on all ranks, and is left alone.
    """

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, mine = group, share(whole.out_features, group)
        self.weight = nn.Parameter(whole.weight.detach()[mine].clone())  # [this rank's outputs, inputs]
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach()[mine].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No communication; in backward one all-reduce of the size of x."""
        return functional.linear(CopyIn.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """`whole`, cut by inputs: [..., this rank's inputs] → [..., outputs], the same on all ranks.

    The bias is whole on all ranks and added once, after the sum, so its gradient is whole on all ranks too.
    """

    def __init__(self, whole: nn.Linear, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, mine = group, share(whole.in_features, group)
        self.weight = nn.Parameter(whole.weight.detach()[:, mine].clone())  # [outputs, this rank's inputs]
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """One all-reduce of the size of the output; in backward no communication."""
        y = SumOut.apply(functional.linear(part, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class TensorParallelPair(nn.Module):
    """`second(activation(first(x)))` over the ranks of `group`: the outputs and gradients of the whole layers.

    activation   acts on each number by itself (gelu, relu; not softmax, not dropout: ranks would need the whole)
    """

    def __init__(
        self,
        first: nn.Linear,
        second: nn.Linear,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.gelu,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if first.out_features != second.in_features:
            raise ValueError(
                f"The first layer gives {first.out_features} features, the second takes {second.in_features}."
            )
        self.first, self.second = ColumnParallelLinear(first, group), RowParallelLinear(second, group)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs of the first] → [..., outputs of the second], the same on all ranks."""
        return self.second(self.activation(self.first(x)))
