"""Small models with a trap in each, and the loop that trains them with what the learner wrote: exercises 05 and 06.

All in float64, so that rounding is no excuse. Ranks are seeded differently. The oracle is in `training_oracle.py`.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.check.recorder import InFlight
from course_lib.check.specs.training_handles import Asked, Spread, alive
from course_lib.launch import watch
from course_lib.parallel.by_hand import DataParallelByHand

WIDTHS = (5, 16, 16, 40, 16, 3)  # of the deep model
GAP_WIDTHS = (5, 16, 16, 16, 3)
INPUTS, OUTPUTS = 5, 3
RATE, MOMENTUM = 0.1, 0.9
NONE = 2  # the way that takes no branch
GAPS = (2, 4)  # the layers that the model "gap" can leave out
TIED = ("2.weight", "2.bias")  # of the tied model, by their first names


class Plain(nn.Sequential):
    """Layers in a row. `way` is for `Branch` only."""

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return super().forward(x)


class Branch(nn.Module):
    """Takes another way in each step and on each rank: some parameters are used on one rank only, some on none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.nobody = nn.Linear(INPUTS, 6), nn.Linear(6, 4)
        self.ways = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(x if way == NONE else self.ways[way](x))


class Gap(nn.Sequential):
    """Leaves out the layer whose number is the way, if that is one of GAPS."""

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = x if number == way and way in GAPS else layer(x)
        return x


class Frozen(nn.Module):
    """Its layers stand in another order than that in which they are used, so gradients come in another one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(7, OUTPUTS), nn.Linear(INPUTS, 6), nn.Linear(6, 7)
        self.first.weight.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _deep(kind: type[nn.Sequential] = Plain, widths: Sequence[int] = WIDTHS) -> nn.Module:
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return kind(*layers[:-1])


def _plain() -> nn.Module:
    return Plain(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, OUTPUTS))


def _tied() -> nn.Module:
    """One layer stands at two places, and another one shares only its weight."""
    layer, cousin = nn.Linear(6, 6), nn.Linear(6, 6)
    cousin.weight = layer.weight
    return Plain(nn.Linear(INPUTS, 6), nn.Tanh(), layer, nn.Tanh(), layer, nn.Tanh(), cousin, nn.Linear(6, OUTPUTS))


def _norm() -> nn.Module:
    """BatchNorm has buffers, which are no parameters. Here they differ between ranks, as after some training."""
    model = Plain(nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, OUTPUTS))
    norm = model[1]
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(0.5, 2.0)
    norm.num_batches_tracked.fill_(int(torch.randint(10**9, ())))
    model.register_buffer("mask", torch.rand(4), persistent=False)  # a buffer that state_dict() does not have
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": _plain, "deep": _deep, "frozen": Frozen, "tied": _tied, "norm": _norm, "branch": Branch,
    "line": lambda: Plain(nn.Linear(INPUTS, OUTPUTS)), "gap": lambda: _deep(Gap, GAP_WIDTHS),
}  # fmt: skip


def build(name: str, seed: int) -> nn.Module:
    """The model as a rank with this seed makes it. The process's own random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all kinds of devices: 100 times slower
        return MODELS[name]().double()


def loss_of(model: nn.Module, batch: torch.Tensor, way: int) -> torch.Tensor:
    """Mean squared error; the first columns of the batch are the inputs, the last ones the targets."""
    output = model(batch[:, :INPUTS], way)
    if not isinstance(output, torch.Tensor):
        given = "None" if output is None else f"a {type(output).__name__}"
        raise TypeError(f"model(x) gave {given}, and must give the output of the module.")
    return nn.functional.mse_loss(output, batch[:, INPUTS:])


@functools.cache
def parameters_of(model: str) -> dict[str, tuple[int, bool]]:
    """Of one of MODELS, in the order of module.parameters(): name, bytes, and whether it is learned."""
    named = build(model, 0).named_parameters()
    return {name: (p.numel() * p.element_size(), p.requires_grad) for name, p in named}


@functools.cache
def buffers_of(model: str) -> int:
    """Bytes of the buffers of one of MODELS."""
    return sum(b.numel() * b.element_size() for b in build(model, 0).buffers())


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers; a tied one has each of its names."""
    return {name: value.clone() for name, value in {**module.state_dict(), **dict(module.named_buffers())}.items()}


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
    try:
        wrapped = wrap(module, **wrapping)
        _is_module(wrapped, module)
        notes.facts["ready_made"] = _ready_made(wrapped)
        # A group of its own for the barriers of this file: theirs must not be taken for the learner's calls.
        fence = dist.new_group() if dist.get_world_size() > 1 else None
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=momentum)
        before = alive()
        for step, batch in enumerate(data):
            _step(wrapped, optimizer, notes, batch, ways[step][rank], fence, rank == patient, patient is not None)
    finally:
        watch.in_place.remove(flight)
        watch.in_place.remove(spread)
        watch.asked.clear()
    notes.facts |= {"touched": flight.touched, "spread": spread.found, "kept": alive() - before}
    return notes.close()


def _step(wrapped, optimizer, notes: Notes, batch, way: int, fence, patient: bool, together: bool) -> None:
    begin = time.monotonic()
    notes.facts["ready"].append([])
    optimizer.zero_grad()
    loss = loss_of(wrapped, batch, way)
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
