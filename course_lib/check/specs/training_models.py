"""Small models with a trap in each: exercises 05, 06 and 12. All in float64, so that rounding is no excuse."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

WIDTHS = (5, 16, 16, 40, 16, 3)  # of the deep model
GAP_WIDTHS = (5, 16, 16, 16, 3)
INPUTS, OUTPUTS = 5, 3
NONE = 2  # the way that takes no branch
GAPS = (2, 4)  # the layers that the model "gap" can leave out
TIED = ("2.weight", "2.bias")  # of the tied model, by their first names


class Plain(nn.Sequential):
    """Layers in a row."""


class Branch(nn.Module):
    """Takes another way in each step and on each rank: some parameters are used on one rank only, some on none."""

    way = NONE

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.nobody = nn.Linear(INPUTS, 6), nn.Linear(6, 4)
        self.ways = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(x if self.way == NONE else self.ways[self.way](x))


class Gap(nn.Sequential):
    """Leaves out the layer whose number is the way, if that is one of GAPS."""

    way = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = x if number == self.way and self.way in GAPS else layer(x)
        return x


class Frozen(nn.Module):
    """Its layers stand in another order than that in which they are used, so gradients come in another one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(7, OUTPUTS), nn.Linear(INPUTS, 6), nn.Linear(6, 7)
        self.first.weight.requires_grad_(False)
        self.middle.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _deep(kind: type[nn.Sequential] = Plain, widths: Sequence[int] = WIDTHS) -> nn.Module:
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return kind(*layers[:-1])


class Waiting(nn.Module):
    """Used in the order a, b, c, d, e. From its last parameter on, the gradients that come first are not first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.d = nn.Linear(INPUTS, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.e, self.c = nn.Linear(7, OUTPUTS), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return self.e(x)


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
    "line": lambda: Plain(nn.Linear(INPUTS, OUTPUTS)), "waiting": Waiting, "gap": lambda: _deep(Gap, GAP_WIDTHS),
}  # fmt: skip


def build(name: str, seed: int) -> nn.Module:
    """The model as a rank with this seed makes it. The process's own random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all kinds of devices: 100 times slower
        return MODELS[name]().double()


def loss_of(model: nn.Module, batch: torch.Tensor, way: int, module: nn.Module | None = None) -> torch.Tensor:
    """Mean squared error; the first columns of the batch are the inputs, the last ones the targets.

    way     what the model shall do this time, where it has a choice. No argument of `model`, whose forward may take one
    module  the one of MODELS that `model` wraps
    """
    (module or model).way = way
    output = model(batch[:, :INPUTS])
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
