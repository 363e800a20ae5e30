"""Exercise 09: the gradients of all ranks in one process, without a scaler, and what the ranks made of them."""

from dataclasses import dataclass

import torch

from course_lib.check.group import Evidence
from course_lib.check.specs.recipe_drive import LR, loss_of
from course_lib.check.specs.torch_ddp_drive import net


def names() -> list[str]:
    """Of each weight: "0.bias[2]"."""
    return [
        f"{name}{list(map(int, torch.unravel_index(torch.tensor(at), p.shape)))}"
        for name, p in net().named_parameters()
        for at in range(p.numel())
    ]


def shares() -> list[int]:
    """How many weights each parameter has."""
    return [p.numel() for p in net().parameters()]


def clipped(gradient: torch.Tensor, max_norm: float) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_ does it, with its 1e-6."""
    return gradient * min(1.0, max_norm / (gradient.norm().item() + 1e-6))


@dataclass(frozen=True)
class Found:
    """One update of all ranks, and what it should have been."""

    update: int
    overflows: bool  # on some rank
    max_norm: float
    local: list[torch.Tensor]  # by rank: the gradient of its own loss at the weights of rank 0, unscaled
    before: list[torch.Tensor]  # weights, by rank
    after: list[torch.Tensor]
    events: list[list[str]]  # what was called, by rank
    scales: list[float]  # the factor afterwards, by rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.local)

    @property
    def mean(self) -> torch.Tensor:
        """The average over the ranks."""
        return sum(self.local) / self.world

    @property
    def right(self) -> torch.Tensor:
        """What the optimizer should get."""
        return clipped(self.mean, self.max_norm)

    @property
    def slack(self) -> float:
        """How much a factor of clipping may differ: torch's has 1e-6 in it, one written by hand need not."""
        norm = self.mean.norm().item()
        return 0.0 if norm < self.max_norm - 1e-6 else 1.01 * self.max_norm * (1 / norm - 1 / (norm + 1e-6))

    @property
    def used(self) -> list[torch.Tensor]:
        """By rank: the gradient that explains how its weights changed."""
        return [(before - after) / LR for before, after in zip(self.before, self.after, strict=True)]


def found_in(e: Evidence, number: int, update: int) -> Found:
    """Of a case that came to its end."""
    case, answers = e.cases[number], e.answers[number]
    factors, module = case.options["factors"][update], net()
    before = [a.tensors[f"weights {update}"] for a in answers]
    torch.nn.utils.vector_to_parameters(before[0].clone(), module.parameters())
    losses = [loss_of(module, s[update], f) for s, f in zip(case.inputs, factors, strict=True)]
    parameters = list(module.parameters())
    local = [torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]) for loss in losses]
    told = [a.facts["updates"][update] for a in answers]
    return Found(
        update,
        max(factors) > 1,
        case.options["max_norm"],
        local,
        before,
        [a.tensors[f"weights {update + 1}"] for a in answers],
        [t["events"] for t in told],
        [t["scale"] for t in told],
    )
