"""Exercise 09, second part: one update with averaged, unscaled, clipped gradients, or none when they overflow."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.check.findings import destroyed, ended_badly, told_apart
from course_lib.check.group import Evidence, GroupCase, GroupMistake, GroupSpec, Wrong
from course_lib.check.specs import recipe_update_mistakes as mistakes
from course_lib.check.specs.recipe_drive import LR, SCALE, drive
from course_lib.check.specs.recipe_oracle import Found, found_in, names
from course_lib.check.specs.torch_ddp_drive import CLASSES, FEATURES

SAMPLES, MAX_NORM = 4, 0.05
SMALL, LARGE = 1 / 300, 1000.0  # factors of the loss: a norm below MAX_NORM, and gradients that fp16 cannot hold


def cases(rng: random.Random) -> list[GroupCase]:
    """Three ranks and two. Of four updates one overflows, on one rank, and one needs no clipping."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    found = []
    for world, culprit in ((3, rng.choice([1, 2])), (2, 0)):
        factors = [[1.0] * world for _ in range(4)]
        factors[1][culprit], factors[2] = LARGE, [SMALL] * world
        inputs = torch.randn(world, 4, SAMPLES, FEATURES + 1, generator=generator, dtype=torch.float64)
        inputs[..., -1] = torch.randint(CLASSES, inputs.shape[:-1], generator=generator)
        story = f"{world} ranks, max_norm={MAX_NORM}; update 1 overflows on rank {culprit} only"
        options = {"seed": rng.getrandbits(30), "factors": factors, "max_norm": MAX_NORM}
        nothing = (torch.zeros(0),) * world
        found.append(GroupCase("updates", story, tuple(inputs.unbind()), nothing, options, drive=drive))
    return found


@dataclass(frozen=True)
class Where:
    """One rank in one update, in words."""

    story: str
    update: int
    rank: int

    def __str__(self) -> str:
        return f"{self.story}. Update {self.update}, rank {self.rank}: "


def values(e: Evidence) -> Wrong | None:
    """The first update whose weights or factor are not right."""
    for number in e.numbers():
        for update in range(4):
            found = found_in(e, number, update)
            for rank in range(found.world):
                text = _differs(found, rank)
                if text:
                    return Wrong("values", f"{Where(e.cases[number].story, update, rank)}{text}", number)
    return None


def _differs(found: Found, rank: int) -> str | None:
    """What is wrong on one rank after one update, in words."""
    steps, wanted = found.events[rank].count("step"), 0 if found.overflows else 1
    if found.overflows and steps:
        return "gradients are infinite or nan, and the optimizer stepped all the same."
    if not found.overflows and not steps:
        return "the optimizer did not step, though no gradient of this update overflows."
    if steps > wanted:
        return f"the optimizer stepped {steps} times."
    before, after = found.before[0], found.after[rank]
    right = before if found.overflows else before - LR * found.right
    allowed = 1e-14 * before.abs() + LR * (1e-10 * found.mean.abs().max() + found.slack * found.mean.abs())
    bad = ~((after - right).abs() <= allowed)
    if bad.any():
        at = int(bad.nonzero()[0])
        change, wanted_change = told_apart((after - before)[at].item(), (right - before)[at].item())
        return f"the weight {names()[at]} changed by {change}, and should change by {wanted_change}."
    factor = SCALE if found.update == 0 else SCALE / 2
    if found.scales[rank] != factor:
        return f"the scaler's factor is {found.scales[rank]:g} afterwards, and should be {factor:g}."
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, values, ended_badly):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    found = found_in(e, 0, 0)
    local = ", ".join(f"{gradient.norm():.2f}" for gradient in found.local)
    return [
        f"gradients were averaged, then clipped: norms of the ranks {local}, of their average {found.mean.norm():.2f}, "
        f"of the step {found.right.norm():.2f}; a norm below {MAX_NORM} was left alone",
        "an overflow on one rank: no rank stepped, all weights stayed as they were, the factor was halved to 32768",
        f"weights equal those of one process after each of 4 updates, on {' and '.join(str(c.world) for c in e.cases)} "
        "ranks",
    ]


def _named(*functions: Callable, kinds: tuple[str, ...]) -> tuple[GroupMistake, ...]:
    return tuple(GroupMistake(f.__name__, f, kinds) for f in functions)


MISTAKES = (
    *_named(*mistakes.OF_VALUES, kinds=("values",)),
    *_named(*mistakes.OF_HANGS, kinds=("hangs", "ended")),
    *_named(*mistakes.OF_ERRORS, kinds=("raised",)),
)
SPEC = GroupSpec("09_recipe", "update", 7, cases, compare, MISTAKES, praise, "updates")
