"""Exercise 07: what one process on all samples finds, and what it would find if it made a usual mistake."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from course_lib.check.findings import told_apart
from course_lib.check.group import GroupCase
from course_lib.check.specs.torch_ddp_drive import cut, net, sgd


@dataclass(frozen=True)
class Update:
    """Gradients at each step of the optimizer, flat, NaN where there was none; weights when `accumulate` returned."""

    grads: list[torch.Tensor]
    weights: torch.Tensor


@dataclass(frozen=True)
class Parts:
    """Of one update: `sums[rank][k]`, the gradient of the summed loss of microbatch k, and `counts[rank][k]`."""

    sums: list[list[torch.Tensor]]
    counts: list[list[int]]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.sums)

    @property
    def count(self) -> int:
        """Samples of all ranks."""
        return sum(map(sum, self.counts))

    def total(self, weight: Callable[[int, int], float] = lambda rank, k: 1.0) -> torch.Tensor:
        """The sum over ranks and microbatches, each times weight(rank, k)."""
        return sum(weight(r, k) * part for r, of_rank in enumerate(self.sums) for k, part in enumerate(of_rank))

    @property
    def right(self) -> torch.Tensor:
        """The gradient of the mean loss of all samples."""
        return self.total() / self.count


def gradient_bytes() -> int:
    """Of the model of the check."""
    return sum(p.numel() * 8 for p in net().parameters())


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One after the other."""
    return torch.cat([t.detach().flatten() for t in tensors])


def parts_at(case: GroupCase, weights: torch.Tensor, update: int) -> Parts:
    """The gradients of all microbatches of an update, each by itself, at these weights."""
    module = net()
    torch.nn.utils.vector_to_parameters(weights, module.parameters())
    sums, counts = [], []
    for samples, sizes in zip(case.inputs, case.options["sizes"], strict=True):
        batches = cut(samples, sizes)[update]
        losses = [F.cross_entropy(module(x), y, reduction="sum") for x, y in batches]
        sums.append([flat(torch.autograd.grad(loss, list(module.parameters()))) for loss in losses])
        counts.append([len(y) for _, y in batches])
    return Parts(sums, counts)


def right_updates(case: GroupCase, start: torch.Tensor) -> list[Update]:
    """All updates of one process that has all samples, from these weights."""
    module = net()
    torch.nn.utils.vector_to_parameters(start.clone(), module.parameters())
    optimizer, found = sgd(module), []
    for update in range(len(case.options["sizes"][0])):
        gradient = parts_at(case, flat(list(module.parameters())), update).right
        for parameter, part in zip(
            module.parameters(), gradient.split([p.numel() for p in module.parameters()]), strict=True
        ):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        found.append(Update([gradient], flat(list(module.parameters()))))
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To 10 digits of the largest number."""
    return got.shape == want.shape and bool(((got - want).abs() <= 1e-10 * max(1e-3, want.abs().max())).all())


def differ(got: torch.Tensor, want: torch.Tensor, what: str) -> str | None:
    """In words, where they differ first; None when they are close."""
    if close(got, want):
        return None
    names = [f"{name}{list(map(int, torch.unravel_index(torch.tensor(at), p.shape)))}"
             for name, p in net().named_parameters() for at in range(p.numel())]  # fmt: skip
    bad = ~((got - want).abs() <= 1e-10 * max(1e-3, want.abs().max()))
    at = int(bad.nonzero()[0])
    if got[at].isnan():
        return f"{what} of {names[at]} is not there (None or NaN); it should be {want[at].item():.6g}."
    is_, right = told_apart(got[at].item(), want[at].item())
    return f"{what} of {names[at]} is {is_}, and should be {right}."
