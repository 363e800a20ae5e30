"""Exercise 09, in the rank: a model computes in the range of fp16, and the learner's `update` makes four updates.

What was called is noted in order, and the weights after each update; the judge knows out there what is right.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn import functional as F

from course_lib.check.specs.torch_ddp_drive import net

LR, SCALE, FP16_MAX = 0.5, 2.0**16, 65504.0


class Fp16Range(torch.autograd.Function):
    """Does nothing, but for gradients that fp16 cannot hold: these become infinite. (Rounding is left out.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient, as far as 65504."""
        return torch.where(gradient.abs() > FP16_MAX, gradient.sign() * torch.inf, gradient)


def loss_of(module: nn.Module, samples: torch.Tensor, factor: float) -> torch.Tensor:
    """The mean loss of a rank in one update; the last column is the label."""
    scores = Fp16Range.apply(module(samples[:, :-1]))
    return F.cross_entropy(scores, samples[:, -1].long()) * factor


class Averaged(nn.Module):
    """As NaiveDDP of exercise 05, but it takes whatever is called, in any order, and notes it."""

    def __init__(self, module: nn.Module, events: list[str]) -> None:
        super().__init__()
        self.module, self.events = module, events

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The module's."""
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Each gradient becomes the average over the ranks."""
        self.events.append("synchronize")
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


class Noted(GradScaler):
    """torch's, and it notes its calls."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("cpu", init_scale=SCALE)
        self.events = events

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's; scaler.step calls it, too, where the learner has not."""
        self.events.append("unscale")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's."""
        self.events.append("scaler.step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's."""
        self.events.append("update")
        super().update(new_scale)


def drive(
    update: Any, samples: torch.Tensor, *, seed: int, factors: list[list[float]], max_norm: float
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`samples`: (updates, n, features + 1), those of this rank. `factors[update][rank]` of the losses."""
    rank, events, told = dist.get_rank(), [], []
    torch.default_generator.manual_seed(seed)  # the same weights on all ranks
    model = Averaged(net(), events)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=LR), Noted(events)
    optimizer.register_step_pre_hook(lambda *_: events.append("step"))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    scaler.scale(torch.zeros(()))  # from now on it has its factor
    tensors = {"weights 0": torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()}
    for number, part in enumerate(samples):
        dist.barrier()  # so that a rank which leaves an update early is not taken for one in the next
        loss = loss_of(model, part, factors[number][rank])
        _call(update, (model, optimizer, scaler, loss, max_norm), number)
        told.append({"events": events[:], "scale": scaler.get_scale()})
        events.clear()
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        tensors[f"weights {number + 1}"] = weights
    return {"updates": told}, tensors


def _call(update: Any, arguments: tuple, number: int) -> None:
    """A complaint of the scaler gets the number of the update: in the first one it means something else."""
    try:
        update(*arguments)
    except (RuntimeError, AssertionError) as error:
        if type(error) in (RuntimeError, AssertionError):
            error.args = (f"{error} (in update {number})",)
        raise
