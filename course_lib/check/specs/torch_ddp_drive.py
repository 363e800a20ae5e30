"""Exercise 07, in the rank: a DDP model is made, and what the learner wrote is used as a training loop would.

Both give after each update what the judge needs; it computes what is right out there.
"""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.check import in_rank
from course_lib.check.specs.torch_ddp_memory import Graphs

FEATURES, HIDDEN, CLASSES = 5, 7, 3
LEFT_OVER = 0.5  # each element of .grad before an update, which must not count


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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As torch's, but counted."""
        self.entered += 1
        with super().no_sync():
            yield

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As torch's, but counted."""
        self.forwards += 1
        self.forwards_inside += not self.require_backward_grad_sync
        return super().forward(*args, **kwargs)


def drive_accumulate(
    accumulate, samples: torch.Tensor, *, sizes: list[list[list[int]]], loud: float
) -> tuple[dict, dict]:
    """`sizes[rank][update]`: samples of each microbatch. Gradients are noted whenever the optimizer steps.

    loud  by what the weights of the last layer are multiplied, so that gradients are large

    Facts, for each update: "steps" of the optimizer; "zeroed", is .grad empty or 0 at the end; "passes" and
    "backwards", see `Graphs`.
    """
    torch.manual_seed(dist.get_rank())  # other weights and other random numbers on each rank
    module = net()
    module[-1].weight.data *= loud
    model = Watched(module, bucket_cap_mb=0.0003)
    optimizer, tensors = sgd(model), {}
    (model(torch.zeros(1, FEATURES, dtype=torch.float64)).sum() * 0).backward()  # from now on DDP's buckets are final
    model.forwards = 0
    graphs = Graphs(module)
    facts: dict[str, list] = {"steps": [], "zeroed": [], "passes": [], "backwards": []}
    flat = lambda found: torch.cat([t.detach().flatten() for t in found])  # noqa: E731

    def note() -> None:
        found = [torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in model.parameters()]
        tensors[f"grad {len(facts['steps']) - 1} {facts['steps'][-1]}"] = flat(found)
        facts["steps"][-1] += 1

    optimizer.register_step_pre_hook(lambda _, args, kwargs: _note_gradients(note, args, kwargs))
    tensors["start"] = flat(model.parameters())
    for number, microbatches in enumerate(cut(samples, sizes[dist.get_rank()])):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, LEFT_OVER)
        facts["steps"].append(0)
        graphs.begin()
        accumulate(model, optimizer, microbatches)
        tensors[f"weights {number}"] = flat(model.parameters())
        facts["passes"].append(graphs.passes)
        facts["backwards"].append(graphs.backwards)
        facts["zeroed"].append(all(p.grad is None or not p.grad.any() for p in model.parameters()))
    return facts | {"entered": model.entered, "forwards": model.forwards, "inside": model.forwards_inside}, tensors


def _note_gradients(note: Callable[[], None], args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Before a step of the optimizer: note now; of step(closure) when the closure, which goes first, has returned.

    args begin with the optimizer. Returns what step() shall get instead, or None.
    """
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        note()
        return None

    def watched() -> Any:
        loss = closure()
        note()
        return loss

    return args[:1], {"closure": watched}


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
    hook,
    gradients: torch.Tensor,
    *,
    lengths: list[int],
    order: list[int],
    bucket_bytes: int,
    settled: bool,
    emptied: int | None = None,
    patient: int | None = None,
    patience: float = 0.0,
) -> tuple[dict, dict]:
    """`gradients`: this rank's, one row for each step. Notes the averaged ones, and what was in which bucket.

    settled  DDP makes its first backward without the hook, so that the hook sees the final buckets only
    emptied  the step before which `state` is emptied
    patient  in each step this rank begins its backward only when all hooks of the others have returned, or `patience`
             seconds later; once it has waited so long, it waits no more

    Facts of each step, in seconds of time.monotonic(): "hooks", begin and end of each call; "began", of backward.
    """
    if "bucket" not in (names := list(inspect.signature(hook).parameters)):
        told = f"The hook's parameters are called {' and '.join(names)}; DDP asks for one called bucket"
        raise TypeError(f"{told}: def onebit_hook(state, bucket).")
    model = DistributedDataParallel(Linear(lengths, order), bucket_cap_mb=bucket_bytes / 2**20)
    number_of = {parameter: number for number, parameter in enumerate(model.module.weights)}
    state: dict = {}
    layouts: list[list[list[int]]] = []
    tensors, calls, starts = {}, [], []

    def watched(state: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        layouts[-1].append([number_of[p] for p in bucket.parameters()])
        calls[-1].append([time.monotonic()])
        future = hook(state, bucket)
        calls[-1][-1].append(time.monotonic())
        if not isinstance(future, torch._C.Future):
            raise NotAFuture(f"the hook returned a {type(future).__name__}, not a Future")
        if patient is not None and bucket.is_last():
            _mark(dist.get_rank(), number).touch()
        return future

    if settled:
        model(gradients[0] * 0).backward()
    model.register_comm_hook(state, watched)
    for number, row in enumerate(gradients):
        layouts.append([])
        calls.append([])
        if number == emptied:
            state.clear()
        model.zero_grad()
        loss = model(row)
        if dist.get_rank() == patient and not _await_others(number, patience):
            patience = 0.0
        starts.append(time.monotonic())
        loss.backward()
        tensors[f"grad {number}"] = torch.cat([w.grad.flatten() for w in model.module.weights])
    return {"layouts": layouts, "hooks": calls, "began": starts}, tensors


def _mark(rank: int, step: int) -> Path:
    """There when the hooks of this rank have returned. A file, since a message would be one more collective."""
    return Path(in_rank.place, f"hooks_{rank}_{step}")


def _await_others(step: int, patience: float) -> bool:
    """Whether their hooks have returned in time."""
    marks = [_mark(rank, step) for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    end = time.monotonic() + patience
    while not all(mark.exists() for mark in marks) and time.monotonic() < end:
        time.sleep(0.0005)
    return all(mark.exists() for mark in marks)


class NotAFuture(TypeError):
    """What DDP waits for is a Future."""
