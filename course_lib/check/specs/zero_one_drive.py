"""Exercise 12, in the rank: a small model is trained, and the learner's class is its optimizer.

Noted are the weights after each step, what the optimizers that it made were given, and how much they keep.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from course_lib.check.specs.training_models import build, loss_of

SGD, MOMENTUM, ADAM = "SGD", "SGD with momentum", "Adam"
KEPT = {SGD: 0, MOMENTUM: 1, ADAM: 2}  # numbers of state for each weight
RATE, SPEED, DECAY, BETAS, EPS = 0.1, 0.9, 0.1, (0.9, 0.99), 1e-2
OPTIMIZERS = {
    SGD: partial(torch.optim.SGD, lr=RATE),
    MOMENTUM: partial(torch.optim.SGD, lr=RATE, momentum=SPEED, weight_decay=DECAY),
    ADAM: partial(torch.optim.Adam, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY),
}
READY_MADE = ("course_lib.parallel.zero", "torch.distributed.optim.zero_redundancy_optimizer")


class Notes:
    """Makes the optimizers, and remembers what they are given."""

    def __init__(self, optimizer: str) -> None:
        self.kind, self.made = optimizer, []
        self.steps: list[int] = []  # in each step, how often an optimizer stepped
        self.given: list[int] = []  # ... and how many numbers had a gradient then

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        """What the learner gets."""
        made = OPTIMIZERS[self.kind](params)
        made.register_step_pre_hook(self._note)
        self.made.append(made)
        return made

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        self.steps[-1] += 1
        self.given[-1] += sum(p.numel() for p in tensors if p.grad is not None)

    def state(self) -> int:
        """How many numbers all of them keep now; a count of steps is none."""
        kept = [t for made in self.made for state in made.state.values() for t in state.values()]
        return sum(t.numel() for t in kept if torch.is_tensor(t) and t.dim())


def drive(
    zero_one: Any, data: torch.Tensor, *, model: str, seed: int, ways: Sequence[Sequence[int]], optimizer: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """data   of this rank: steps, samples, inputs and targets. `model`, `ways`: see `training`.

    All ranks build the same weights. Facts, for each step: "steps" and "given", see Notes; "times" of its begin and its
    end, of time.monotonic(). And "made", the number of optimizers, "state" after the last step, "ready_made".
    Tensors: "weights" of all parameters, one row for each step.
    """
    rank, notes = dist.get_rank(), Notes(optimizer)
    module = build(model, seed)
    parameters, rows, times = list(module.parameters()), [], []
    zero = zero_one(module.parameters(), notes.make_optimizer)
    for step, batch in enumerate(data):
        notes.steps.append(0)
        notes.given.append(0)
        begin = time.monotonic()
        loss_of(module, batch, ways[step][rank]).backward()
        zero.step()
        rows.append(torch.cat([p.detach().flatten() for p in parameters]))
        zero.zero_grad()
        times.append([begin, time.monotonic()])
    facts = {"times": times, "steps": notes.steps, "given": notes.given, "state": notes.state()}
    return facts | {"made": len(notes.made), "ready_made": _ready_made(zero)}, {"weights": torch.stack(rows)}


def _ready_made(zero: object) -> str:
    held = [zero, *getattr(zero, "__dict__", {}).values()]
    bases = [base for thing in held for base in type(thing).__mro__]
    return next((base.__name__ for base in bases if base.__module__ in READY_MADE), "")
