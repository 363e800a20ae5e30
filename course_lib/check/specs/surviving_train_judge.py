"""Exercise 10, second part: what is right. The straight run is compared with one process; the other one with it."""

from typing import Any

import torch
from torch.nn import functional as F

from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, RankAnswer, Wrong
from course_lib.check.specs.surviving_train import (
    INPUTS,
    KILLED_AT,
    LAST,
    MOMENTUM,
    RATE,
    SAVES,
    STEPS,
    WORLD,
    flat,
    network,
)

NAMES = ("the straight run", "launch 1", "launch 2", "launch 3")


class Seen:
    """What the ranks brought back, by launch."""

    def __init__(self, e: Evidence) -> None:
        self.answers: list[RankAnswer] = e.answers[0]
        self.count = min(len(answer.facts["launches"]) for answer in self.answers)

    def note(self, launch: int, rank: int = 0) -> dict[str, Any]:
        return self.answers[rank].facts["launches"][launch]

    def tensor(self, name: str, launch: int, rank: int = 0) -> torch.Tensor:
        return self.answers[rank].tensors[f"{name} {launch}"]

    def mask(self, launch: int, rank: int, step: int) -> torch.Tensor | None:
        """The dropout mask of a step, if this launch made it."""
        asked, masks = self.note(launch, rank)["asked"], self.tensor("masks", launch, rank)
        at = asked.index(step) if step in asked else len(masks)
        return masks[at] if at < len(masks) else None

    def after(self, step: int, rank: int = 0) -> torch.Tensor:
        """The straight run's weights after a step."""
        return self.tensor("weights", 0, rank)[step - 1]


def oracle(e: Evidence) -> torch.Tensor:
    """One process, the batches of all ranks, the masks that they drew: the weights after each step."""
    seen = Seen(e)
    module = network(0)
    torch.nn.utils.vector_to_parameters(seen.tensor("held", 0), module.parameters())
    weights, found = [*module.parameters()], []
    momentum = [torch.zeros_like(weight) for weight in weights]
    for step in range(1, LAST + 1):  # SGD by hand: torch's optimizers import torch._dynamo, which takes seconds
        loss = sum(_loss(module, e.cases[0].inputs[r][step - 1], seen.mask(0, r, step)) for r in range(WORLD)) / WORLD
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, held in zip(weights, gradients, momentum, strict=True):
                held.mul_(MOMENTUM).add_(gradient)
                weight -= RATE * held
        found.append(flat(weights))
    return torch.stack(found)


def _loss(module: torch.nn.Module, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(_normed(module, module[0](rows[:, :INPUTS])))
    return F.cross_entropy(module[4](hidden * mask / 0.7), rows[:, INPUTS].long())


def _normed(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """BatchNorm by its formula, with the statistics of these samples."""
    centred = x - x.mean(0)
    return centred / (centred.square().mean(0) + 1e-5).sqrt() * module[1].weight + module[1].bias


def saved_by_all(e: Evidence) -> Wrong | None:
    for rank in range(1, WORLD):
        if saves := Seen(e).note(0, rank)["saves"]:
            return Wrong("writers", f"Rank {rank} saved step {saves[0][0]} as well.", 0)
    return None


def content(e: Evidence) -> Wrong | None:
    """What is in a checkpoint is data, by the names of the bare network, of the right steps."""
    note = Seen(e).note(0)
    if note["objects"]:
        return Wrong("content", "torch.load with weights_only=True refuses what rank 0 saved: it is not only data.", 0)
    if any(prefixed for _, prefixed, _ in note["saves"]):
        return Wrong("content", 'The names in the saved state begin with "module.".', 0)
    if (steps := [step for step, *_ in note["saves"]]) != SAVES:
        text = (
            f"In a run of {LAST} steps rank 0 saved at {steps or 'no step'}; needed is {SAVES}: every 2, and the last."
        )
        return Wrong("saves", text, 0)
    return None


def straight(e: Evidence) -> Wrong | None:
    """The run that nobody disturbed."""
    seen = Seen(e)
    for rank in range(WORLD):
        if (asked := seen.note(0, rank)["asked"]) != STEPS[0]:
            return Wrong(
                "steps", f"The straight run: rank {rank} asked for the batches of {asked}, not 1 to {LAST}.", 0
            )
        if len(seen.tensor("masks", 0, rank)) != LAST or len(seen.tensor("weights", 0, rank)) != LAST:
            text = f"The straight run: rank {rank} made {len(seen.tensor('masks', 0, rank))} forwards in training mode "
            text += f"and {len(seen.tensor('weights', 0, rank))} steps of the optimizer, for {LAST} batches."
            return Wrong("steps", text, 0)
    right = oracle(e)
    for step in range(1, LAST + 1):
        for rank in range(WORLD):
            got, want = seen.after(step, rank), right[step - 1]
            if not torch.allclose(got, want, rtol=1e-10, atol=1e-12):
                text = f"The straight run: after step {step} the weights of rank {rank} are not those of one process."
                return Wrong("training", f"{text} {_first(got, want)}", 0)
    return None


def _first(got: torch.Tensor, want: torch.Tensor) -> str:
    at = int((got - want).abs().argmax())
    return f"The largest difference: {got[at]:.9g}, and {want[at]:.9g} is right."


def masks(e: Evidence) -> Wrong | None:
    """Random numbers differ from step to step and from rank to rank."""
    seen = Seen(e)
    if torch.equal(seen.mask(0, 0, 1), seen.mask(0, 0, 2)) and torch.equal(seen.mask(0, 0, 2), seen.mask(0, 0, 3)):
        return Wrong("random", "Dropout has the same mask in steps 1, 2 and 3.", 0)
    if torch.equal(seen.mask(0, 0, 1), seen.mask(0, 1, 1)) and torch.equal(seen.mask(0, 0, 2), seen.mask(0, 1, 2)):
        return Wrong("random", "Dropout has the same masks on rank 0 and on rank 1.", 0)
    return None


def resumed(e: Evidence) -> Wrong | None:
    """Each launch after a kill."""
    seen = Seen(e)
    for launch in range(1, seen.count):
        name = NAMES[launch] + (f" (killed in step {KILLED_AT[launch]})" if KILLED_AT[launch] else "")
        starts = seen.note(launch)["starts"]
        if len(set(starts)) > 1:
            told = ", ".join(f"rank {rank} {f'with step {s}' if s else 'nothing'}" for rank, s in enumerate(starts))
            return Wrong("start", f"{name}: the ranks do not begin together: {told}.", 0)
        for rank in range(WORLD):
            if (asked := seen.note(launch, rank)["asked"]) != STEPS[launch]:
                wanted = STEPS[launch] or "none, since all are done"
                text = f"{name}: rank {rank} asked for the batches of steps {asked}; needed are {wanted}."
                return Wrong("again", text, launch)
        for rank in range(WORLD):
            for step, got in zip(STEPS[launch], seen.tensor("weights", launch, rank), strict=False):
                if not torch.equal(got, seen.after(step, rank)):
                    text = f"{name}: after step {step} the weights of rank {rank} are not, bit for bit, those of the "
                    return Wrong("bits", f"{text}straight run. {_first(got, seen.after(step, rank))}", launch)
    return None


def end(e: Evidence) -> Wrong | None:
    """What the finished runs hold. Started once more, a finished run has its weights, too."""
    seen = Seen(e)
    for launch in (2, 3):
        for rank in range(WORLD):
            if not torch.equal(seen.tensor("parameters", launch, rank), seen.tensor("parameters", 0, rank)):
                text = (
                    f"{NAMES[launch]}, when all is done: the weights of rank {rank} are not those of the straight run."
                )
                return Wrong("bits", text, launch)
        if not torch.equal(seen.tensor("buffers", launch), seen.tensor("buffers", 0)):
            text = f"{NAMES[launch]}: rank 0 has the weights of the straight run, but not its BatchNorm statistics."
            return Wrong("buffers", text, launch)
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, ended_badly, saved_by_all, content, straight, masks, resumed, end):
        if wrong := look(e):
            return wrong
    return None
