"""Exercise 12: the weights that one process has with the whole optimizer. Without torch.optim and torch.distributed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib.check.group import GroupCase
from course_lib.check.specs.training_models import INPUTS, OUTPUTS, build, loss_of
from course_lib.check.specs.training_oracle import SAMPLES, STEPS, WAYS
from course_lib.check.specs.zero_one_drive import ADAM, BETAS, DECAY, EPS, KEPT, RATE, SGD, SPEED, drive


@dataclass(frozen=True)
class Way:
    """How the update is made. A mistake exchanges a part; as it stands it is right."""

    factor: float = 1.0  # of the mean over the ranks
    only: int | None = None  # the gradient of this rank, instead of the mean
    forgets: bool = False  # the optimizer's state is gone after each step
    accumulates: bool = False  # gradients of earlier steps are still there
    frozen: bool = False  # frozen weights are updated, too, with gradient zero


class Rule:
    """An optimizer written out, on one vector.

    SGD: v = 0.9 v + g, p -= rate v. Adam (Kingma and Ba 2015, algorithm 1): m and v are moving averages of g and g*g,
    corrected by 1 - beta**t, and p -= rate m / (sqrt(v) + eps). Weight decay adds 0.1 p to g first.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.steps, self.m, self.v = kind, 0, 0.0, 0.0

    def change(self, p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """What is added to p."""
        if self.kind == SGD:
            return -RATE * g
        g, self.steps = g + DECAY * p, self.steps + 1
        if self.kind != ADAM:
            self.v = SPEED * self.v + g
            return -RATE * self.v
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g
        m, v = self.m / (1 - BETAS[0] ** self.steps), self.v / (1 - BETAS[1] ** self.steps)
        return -RATE * m / (v.sqrt() + EPS)


@dataclass(frozen=True)
class ZeroCase(GroupCase):
    """A case whose ranks train. `weights`: of all parameters, side by side, a row for each step."""

    start: torch.Tensor = field(kw_only=True)
    weights: torch.Tensor = field(kw_only=True)
    trained: torch.Tensor = field(kw_only=True)  # bool: not frozen
    names: list[str] = field(kw_only=True)  # of each weight: "0.bias[2]"
    parameters: int = field(kw_only=True)  # how many are trained

    @property
    def kept(self) -> int:
        """How many numbers the whole optimizer keeps for each weight."""
        return KEPT[self.options["optimizer"]]

    @property
    def numbers(self) -> int:
        """How many weights are trained."""
        return int(self.trained.sum())

    @property
    def steps(self) -> range:
        """Their numbers."""
        return range(len(self.weights))

    def before(self, step: int) -> torch.Tensor:
        """The right weights before a step."""
        return self.weights[step - 1] if step else self.start

    def gradient(self) -> torch.Tensor:
        """Of the first step: the mean over the ranks, with zeros where nothing is trained."""
        module = build(self.options["model"], self.options["seed"])
        return gradient_of(module, [data[0] for data in self.inputs], self.options["ways"][0])

    def closed_up(self) -> torch.Tensor:
        """Wrong weights after the first step: each rank leaves out what has no gradient, and the rest moves up."""
        module, total = build(self.options["model"], self.options["seed"]), torch.zeros_like(self.start)
        for data, way in zip(self.inputs, self.options["ways"][0], strict=True):
            loss = loss_of(module, data[0], way)
            found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
            flat = torch.cat([g.flatten() for g in found if g is not None])
            total[: len(flat)] += flat
        return self.start + Rule(self.options["optimizer"]).change(self.start, total / self.world)

    def by(self, way: Way) -> torch.Tensor:
        """As `weights`, by another way."""
        return one_process(self.inputs, way=way, **self.options)


def case(rng: random.Random, model: str, world: int, optimizer: str) -> ZeroCase:
    """Fresh weights and data."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    shape = (STEPS, SAMPLES, INPUTS + OUTPUTS)
    inputs = tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(world))
    ways = [WAYS[step] if model == "branch" else (0,) * world for step in range(STEPS)]
    options = {"model": model, "seed": rng.getrandbits(40), "ways": ways, "optimizer": optimizer}
    module = build(model, options["seed"])
    named = list(module.named_parameters())
    trained = torch.cat([torch.full((p.numel(),), p.requires_grad) for _, p in named])
    names = [f"{name}{_place(at, p)}" for name, p in named for at in range(p.numel())]
    count = sum(p.requires_grad for _, p in named)
    story = f"{world} rank{'s' * (world > 1)}, a model {_WORDS[model]} ({int(trained.sum())} weights), {optimizer}"
    return ZeroCase(
        model, story, inputs, (), options, drive=drive, start=parameters_to_vector(module.parameters()).detach(),
        weights=one_process(inputs, **options), trained=trained, names=names, parameters=count,
    )  # fmt: skip


_WORDS = {
    "plain": "of two layers",
    "frozen": "with frozen parameters",
    "tied": "with tied weights",
    "branch": "with branches",
}


def _place(at: int, p: torch.Tensor) -> list[int]:
    return [int(index) for index in torch.unravel_index(torch.tensor(at), p.shape)]


def gradient_of(module: nn.Module, batches: Sequence[torch.Tensor], ways: Sequence[int]) -> torch.Tensor:
    """Of the mean of these losses: of all parameters, side by side."""
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    losses = [loss_of(module, batch, way) for batch, way in zip(batches, ways, strict=True)]
    found = torch.autograd.grad(sum(losses) / len(losses), trained, allow_unused=True, materialize_grads=True)
    by_parameter = dict(zip(trained, found, strict=True))
    return torch.cat([by_parameter.get(p, torch.zeros_like(p)).flatten() for p in parameters])


def one_process(
    inputs: Sequence[torch.Tensor],
    model: str,
    seed: int,
    ways: Sequence[Sequence[int]],
    optimizer: str,
    way: Way = Way(),
) -> torch.Tensor:
    """Weights after each step, [steps, weights]: one process with the samples of all ranks."""
    module, rule, rows = build(model, seed), Rule(optimizer), []
    moved = torch.cat([torch.full((p.numel(),), p.requires_grad or way.frozen) for p in module.parameters()])
    ranks = range(len(inputs)) if way.only is None else [way.only]
    earlier = torch.zeros(len(moved), dtype=torch.float64)
    for step in range(len(inputs[0])):
        batches, branches = [inputs[rank][step] for rank in ranks], [ways[step][rank] for rank in ranks]
        gradient = earlier + gradient_of(module, batches, branches)
        earlier = gradient if way.accumulates else earlier
        weights = parameters_to_vector(module.parameters()).detach()
        weights = torch.where(moved, weights + rule.change(weights, way.factor * gradient), weights)
        rule = Rule(optimizer) if way.forgets else rule
        vector_to_parameters(weights, module.parameters())
        rows.append(weights.clone())
    return torch.stack(rows)
