"""Exercise 07, in the rank: a DDP model is made, and what the learner wrote is used as a training loop would.

Both give after each update what the judge needs; it computes what is right out there.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, HIDDEN, CLASSES = 5, 7, 3


def net() -> nn.Module:
    """Two layers, float64."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


def sgd(module: nn.Module) -> torch.optim.SGD:
    """The optimizer of rank and oracle."""
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


def cut(samples: torch.Tensor, sizes: list[list[int]]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """A rank's samples as microbatches (inputs, labels), for each update; the label is the last column."""
    updates, at = [], 0
    for of_update in sizes:
        updates.append([])
        for size in of_update:
            part = samples[at : at + size]
            updates[-1].append((part[:, :-1].clone(), part[:, -1].long()))
            at += size
    return updates


class Watched(DistributedDataParallel):
    """Counts the forwards, how often `no_sync` was entered, and the forwards in it."""

    entered = forwards = forwards_inside = 0

    def no_sync(self):
        """As torch's, but counted."""
        self.entered += 1
        return super().no_sync()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's, but counted."""
        self.forwards += 1
        self.forwards_inside += not self.require_backward_grad_sync
        return super().forward(*args, **kwargs)


def drive_accumulate(accumulate, samples: torch.Tensor, *, sizes: list[list[list[int]]]) -> tuple[dict, dict]:
    """`sizes[rank][update]`: samples of each microbatch. Gradients are noted whenever the optimizer steps."""
    torch.manual_seed(dist.get_rank())  # other weights and other random numbers on each rank
    model = Watched(net(), bucket_cap_mb=0.0003)
    optimizer, tensors = sgd(model), {}
    (model(torch.zeros(1, FEATURES, dtype=torch.float64)).sum() * 0).backward()  # from now on DDP's buckets are final
    model.zero_grad()
    model.forwards = 0
    steps: list[int] = []
    flat = lambda found: torch.cat([t.detach().flatten() for t in found])  # noqa: E731

    def note(*_: object) -> None:
        found = [torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in model.parameters()]
        tensors[f"grad {len(steps) - 1} {steps[-1]}"] = flat(found)
        steps[-1] += 1

    optimizer.register_step_pre_hook(note)
    tensors["start"] = flat(model.parameters())
    for number, microbatches in enumerate(cut(samples, sizes[dist.get_rank()])):
        steps.append(0)
        accumulate(model, optimizer, microbatches)
        tensors[f"weights {number}"] = flat(model.parameters())
    facts = {"entered": model.entered, "forwards": model.forwards, "inside": model.forwards_inside}
    return {"steps": steps, **facts}, tensors


class Linear(nn.Module):
    """Its loss is the sum of parameter times coefficient: so the gradient is whatever the judge wants it to be.

    `order`: in which order the parameters are used; gradients arrive the other way round.
    """

    def __init__(self, lengths: list[int], order: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(length, dtype=torch.float64) for length in lengths)
        self.order = order

    def forward(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The loss; `coefficients`: one for each element, in the order of the parameters."""
        parts = coefficients.split([w.numel() for w in self.weights])
        loss = coefficients.new_zeros(())
        for number in self.order:
            loss = loss + (self.weights[number] * parts[number]).sum()
        return loss


def drive_hook(
    hook, gradients: torch.Tensor, *, lengths: list[int], order: list[int], bucket_bytes: int, settled: bool
) -> tuple[dict, dict]:
    """`gradients`: this rank's, one row for each step. Notes the averaged ones, and what was in which bucket.

    settled  DDP makes its first backward without the hook, so that the hook sees the final buckets only
    """
    model = DistributedDataParallel(Linear(lengths, order), bucket_cap_mb=bucket_bytes / 2**20)
    number_of = {parameter: number for number, parameter in enumerate(model.module.weights)}
    state: dict = {}
    layouts: list[list[list[int]]] = []
    tensors = {}

    def watched(state: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        layouts[-1].append([number_of[p] for p in bucket.parameters()])
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise NotAFuture(f"the hook returned a {type(future).__name__}, not a Future")
        return future

    if settled:
        model(gradients[0] * 0).backward()
    model.register_comm_hook(state, watched)
    for number, row in enumerate(gradients):
        layouts.append([])
        model.zero_grad()
        model(row).backward()
        tensors[f"grad {number}"] = torch.cat([w.grad.flatten() for w in model.module.weights])
    return {"layouts": layouts}, tensors


class NotAFuture(TypeError):
    """What DDP waits for is a Future."""
