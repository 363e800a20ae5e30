"""What training on several ranks must give: computed in one process, without torch.distributed and torch.optim."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from course_lib.check.group import GroupCase
from course_lib.check.specs.training import MOMENTUM, RATE, train
from course_lib.check.specs.training_models import INPUTS, NONE, OUTPUTS, build, loss_of, state

STEPS, SAMPLES = 3, 4  # of each rank, in each step
RIGHT = {"rtol": 1e-10, "atol": 1e-13}  # rounding, in float64
# Way of each rank in each step: some take no branch, in step 1 nobody does, in step 2 all ways are taken again.
WAYS = ((0, 1, NONE), (NONE, NONE, NONE), (1, NONE, 0))


@dataclass(frozen=True)
class Truth:
    """One process on the whole batch, step by step; stacked over the steps."""

    start: dict[str, torch.Tensor]  # parameters and buffers of rank 0, as built
    built: list[dict[str, torch.Tensor]]  # the same of each rank
    grad: dict[str, torch.Tensor]  # the mean over the ranks; zero where no rank has one
    weight: dict[str, torch.Tensor]
    local: list[dict[str, torch.Tensor]]  # of each rank alone; NaN where it has none

    @property
    def nbytes(self) -> dict[str, int]:
        """Of each learnable parameter, in the order of named_parameters()."""
        return {name: value[0].numel() * value.element_size() for name, value in self.grad.items()}


@dataclass(frozen=True)
class TrainCase(GroupCase):
    """A case whose rank trains, with what is right."""

    truth: Truth = field(kw_only=True)

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.inputs[0])


def case(
    rng: random.Random,
    group: str,
    model: str,
    world: int,
    wrapping: dict,
    steps: int = STEPS,
    ways: Sequence[Sequence[int]] | None = None,
    **more,
) -> TrainCase:
    """Fresh seeds and data; momentum but in the model "branch", where None and zero must do the same."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    shape = (steps, SAMPLES, INPUTS + OUTPUTS)
    inputs = tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(world))
    seeds = tuple(rng.sample(range(2**40), world))
    ways = ways or tuple(WAYS[step % len(WAYS)][:world] for step in range(steps))
    momentum = 0.0 if model == "branch" else MOMENTUM
    options = {
        "model": model, "seeds": seeds, "ways": ways, "wrapping": wrapping, "momentum": momentum, **more,
    }  # fmt: skip
    with _one_thread():
        truth = one_process(model, seeds, inputs, ways, momentum)
    story = f"{world} rank{'s' * (world > 1)}, {_WORDS[model]}"
    return TrainCase(group, story, inputs, (), options, drive=train, truth=truth)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For tensors as small as these, a second thread costs more than it saves, above all where ranks are at work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_WORDS = {
    "plain": "a model of two layers",
    "deep": "a model of five layers",
    "frozen": "a model with frozen parameters",
    "tied": "a model with tied weights",
    "norm": "a model with BatchNorm",
    "branch": "a model with branches",
    "line": "a model of one layer",
    "waiting": "a model whose layers stand in another order than that of their use",
    "gap": "a model of four layers, one of which is left out on one rank in one step",
}


def one_process(
    model: str, seeds: Sequence[int], inputs: Sequence[torch.Tensor], ways: Sequence[Sequence[int]], momentum: float
) -> Truth:
    """Train from rank 0's weights; in each step the mean of the ranks' losses. SGD written out: v = mv + g, p -= rv.

    Each rank's part is a forward of its own, because BatchNorm takes its statistics from that part.
    """
    built = [state(build(model, seed)) for seed in seeds]
    module, world = build(model, seeds[0]), len(inputs)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    speed = {name: torch.zeros_like(p) for name, p in named}
    stacked: dict[str, list[torch.Tensor]] = {}
    for step in range(len(inputs[0])):
        total = {name: torch.zeros_like(p) for name, p in named}
        for rank in range(world):
            loss = loss_of(module, inputs[rank][step], ways[step][rank])
            found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
            for (name, p), grad in zip(named, found, strict=True):
                total[name] += 0 if grad is None else grad
                missing = torch.full_like(p, torch.nan) if grad is None else grad
                stacked.setdefault(f"{rank}/{name}", []).append(missing)
        with torch.no_grad():
            for name, p in named:
                grad = total[name] / world
                speed[name] = momentum * speed[name] + grad
                p -= RATE * speed[name]
                stacked.setdefault(f"grad/{name}", []).append(grad)
                stacked.setdefault(f"weight/{name}", []).append(p.detach().clone())

    def all_steps(kind: str) -> dict[str, torch.Tensor]:
        return {name: torch.stack(stacked[f"{kind}/{name}"]) for name, _ in named}

    local = [all_steps(str(rank)) for rank in range(world)]
    return Truth(built[0], built, all_steps("grad"), all_steps("weight"), local)
