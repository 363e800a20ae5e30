"""The loop that trains one of `training_models` with what the learner wrote: exercises 05 and 06.

Ranks are seeded differently. The oracle is in `training_oracle.py`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.check.recorder import InFlight
from course_lib.check.specs.training_handles import Asked, Spread, alive, count_from_here
from course_lib.check.specs.training_models import build, loss_of, state
from course_lib.launch import watch
from course_lib.parallel.by_hand import DataParallelByHand

RATE, MOMENTUM = 0.1, 0.9


class Notes:
    """What a rank remembers of its training."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.learnable = module, [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.facts: dict[str, Any] = {"ready": [], "times": [], "missing": [], "hooked": []}
        self.tensors: dict[str, torch.Tensor] = {}
        self._stacked: dict[str, list[torch.Tensor]] = {}
        # Of each part, since module.forward(x) and a walk through the layers call no hook of the module itself.
        self._first = [part.register_forward_pre_hook(lambda *_: self._begin()) for part in module.modules()]
        for name, parameter in self.learnable:
            parameter.register_hook(lambda _, name=name: self.facts["ready"][-1].append([name, time.monotonic()]))

    def _begin(self) -> None:
        """Before the first forward: what the ranks start from."""
        if not self.tensors:
            self.tensors |= {f"start/{name}": value for name, value in state(self.module).items()}
        for hook in self._first:
            hook.remove()

    def called(self) -> None:
        """After a forward. Raises ValueError when neither the module nor one of its layers has been called."""
        if not self.tensors:
            raise ValueError(
                "model(x) called neither the module nor a layer of it: call self.module(...) in forward()."
            )

    def hooked(self) -> bool:
        """Whether somebody has hooked a parameter, beside us."""
        hooks = ((p._post_accumulate_grad_hooks or {}, p._backward_hooks or {}) for _, p in self.learnable)
        return any(len(after) + len(before) > 1 for after, before in hooks)

    def stack(self, kind: str) -> None:
        """Remember all gradients ("grad") or all parameters (any other word) as they are now."""
        for name, parameter in self.learnable:
            value = parameter.grad if kind == "grad" else parameter
            value = torch.full_like(parameter, torch.nan) if value is None else value
            self._stacked.setdefault(f"{kind}/{name}", []).append(value.detach().clone())

    def close(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return self.facts, self.tensors | {name: torch.stack(values) for name, values in self._stacked.items()}


def train(
    wrap: Callable[..., nn.Module],
    data: torch.Tensor,
    model: str,
    seeds: Sequence[int],
    ways: Sequence[Sequence[int]],
    wrapping: dict[str, Any],
    momentum: float = 0.0,
    patient: int | None = None,
    prompt: bool = False,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """In the rank: train one of MODELS, wrapped by the learner's class, as any loop would.

    data      of this rank: steps, samples, INPUTS + OUTPUTS
    seeds     of the ranks
    ways      in each step, for each rank
    wrapping  keyword arguments of the class, beside the module
    patient   this rank begins each backward only when the others have ended theirs
    prompt    nobody may wait inside backward: who asks a handle again and again there is stopped

    Facts, for each step: "ready", when backward had each gradient; "times" of (begin of the step, of backward, its
    end, end of `synchronize`), all of time.monotonic(); "missing", the parameters whose gradient is None; "hooked",
    whether parameters had hooks when backward ended. "spread": see `Spread`. And "kept": how many more handles are
    alive at the end than at the begin.
    Tensors: "start/NAME" at the first forward; "grad/NAME" after `synchronize`, "held/NAME" the parameters at that
    moment, "weight/NAME" after the optimizer, each stacked over the steps.
    """
    rank, flight = dist.get_rank(), InFlight()
    module = build(model, seeds[rank])
    notes = Notes(module)
    asked = Asked(notes.facts["ready"]) if prompt else None
    spread = Spread(module, notes.facts["ready"])
    watch.in_place.extend([flight, spread])
    watch.asked.extend([asked] if asked else [])
    fence = _own_group()
    try:
        wrapped = wrap(module, **wrapping)
        _is_module(wrapped, module)
        notes.facts["ready_made"] = _ready_made(wrapped)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=momentum)
        count_from_here()
        for step, batch in enumerate(data):
            _step(wrapped, optimizer, notes, batch, ways[step][rank], fence, rank == patient, patient is not None)
    finally:
        watch.in_place.remove(flight)
        watch.in_place.remove(spread)
        watch.asked.clear()
    notes.facts |= {"touched": flight.touched, "spread": spread.found, "kept": alive()}
    return notes.close()


def _step(wrapped, optimizer, notes: Notes, batch, way: int, fence, patient: bool, together: bool) -> None:
    begin = time.monotonic()
    notes.facts["ready"].append([])
    optimizer.zero_grad()
    loss = loss_of(wrapped, batch, way, notes.module)
    notes.called()
    if patient:
        _meet(fence)
    backward = time.monotonic()
    loss.backward()
    ended = time.monotonic()
    notes.facts["hooked"].append(notes.hooked())
    if together and not patient:
        _meet(fence)
    wrapped.synchronize()
    notes.facts["times"].append([begin, backward, ended, time.monotonic()])
    notes.facts["missing"].append([name for name, p in notes.learnable if p.grad is None])
    notes.stack("grad")
    notes.stack("held")
    _meet(fence)
    optimizer.step()
    notes.stack("weight")


_made: tuple[dist.ProcessGroup, dist.ProcessGroup | None] | None = None  # the default group, and ours beside it


def _own_group() -> dist.ProcessGroup | None:
    """A group for the barriers of this file: theirs must not be taken for the learner's calls. None for one rank.

    It is made before these, since nobody sees that a rank waits for the others there, and once for all cases of as many
    ranks.
    """
    global _made
    everybody = dist.group.WORLD
    if _made is None or _made[0] is not everybody:
        _made = everybody, dist.new_group() if dist.get_world_size() > 1 else None
    return _made[1]


def _meet(fence: dist.ProcessGroup | None) -> None:
    """Steps must not run into each other, whatever the learner's ranks send or leave out."""
    if fence is not None:
        dist.barrier(group=fence)


def _is_module(wrapped: object, module: nn.Module) -> None:
    if not isinstance(wrapped, nn.Module):
        raise TypeError(
            f"The wrapper is a {type(wrapped).__name__}, and must be a torch.nn.Module that holds the module: "
            "super().__init__(), then self.module = module."
        )
    if {id(p) for p in wrapped.parameters()} != {id(p) for p in module.parameters()}:
        raise ValueError(
            "model.parameters() must give the parameters of the module, since the optimizer takes them from there: "
            "self.module = module, and no copy of it."
        )


def _ready_made(wrapped: nn.Module) -> str:
    known = (DataParallelByHand, nn.parallel.DistributedDataParallel)
    return next((type(part).__name__ for part in wrapped.modules() if isinstance(part, known)), "")
