"""Exercise 07, first part: one update from several microbatches. Judged: gradients, weights, bytes, updates."""

import random
from collections.abc import Callable

import torch

from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, GroupCase, GroupMistake, GroupSpec, Wrong
from course_lib.check.specs import torch_ddp_accumulate_mistakes as mistakes
from course_lib.check.specs import torch_ddp_accumulate_ways as ways
from course_lib.check.specs.torch_ddp_accumulate_looks import calls, few, growing, memory, traffic, values
from course_lib.check.specs.torch_ddp_drive import CLASSES, FEATURES, drive_accumulate
from course_lib.check.specs.torch_ddp_oracle import gradient_bytes

LOUD = 1000.0  # by this the last layer's weights grow where gradients shall be large: then clipping would show


def _case(
    group: str, sizes: list[list[list[int]]], generator: torch.Generator, note: str, loud: float = 1.0
) -> GroupCase:
    inputs = []
    for of_rank in sizes:
        total = sum(map(sum, of_rank))
        samples = torch.randn(total, FEATURES + 1, generator=generator, dtype=torch.float64)
        samples[:, -1] = torch.randint(CLASSES, (total,), generator=generator)
        inputs.append(samples)
    world = len(sizes)
    told = ", ".join(f"rank {rank}: {_in_words(of_rank)}" for rank, of_rank in enumerate(sizes))
    story = f"{world} ranks, {note} (samples, update by update: {told})"
    nothing = (torch.zeros(0),) * world
    options = {"sizes": sizes, "loud": loud}
    return GroupCase(group, story, tuple(inputs), nothing, options, drive=drive_accumulate)


def _in_words(of_rank: list[list[int]]) -> str:
    """4+3 and 2+1: the microbatches of a rank."""
    return " and ".join("+".join(map(str, of_update)) for of_update in of_rank)


def cases(rng: random.Random) -> list[GroupCase]:
    """Uneven microbatches on three ranks; one each, with large gradients; a rank that runs out of samples."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))

    def some() -> int:
        return rng.randint(2, 6)

    # The first and the last microbatch differ in length, and so do the ranks: else wrong divisors would be right.
    # And four on three ranks, so that a division by one of these numbers is not taken for one by the other.
    uneven = [[[7 + rank, some(), some(), 1 + rank] for _ in range(2)] for rank in range(3)]
    single = [[[3 + rank]] for rank in range(3)]
    tail = [[[4, 3], [2, 1]], [[5, 0], [0, 0]]]
    return [
        _case("uneven", uneven, generator, "4 microbatches each"),
        _case("single", single, generator, "1 microbatch each, large gradients", LOUD),
        _case("tail", tail, generator, "2 microbatches each"),
    ]


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, values, ended_badly, memory, traffic, growing, few):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    number = e.numbers(group="uneven")[0]
    return [
        "gradients and weights equal those of one process on all samples, after each update, to 10 digits "
        f"({len(e.cases)} cases, 2 and 3 ranks, uneven microbatches, some of them empty)",
        f"the gradients ({gradient_bytes()} bytes) travelled once an update; rank 0 made {calls(e, number):g} calls an "
        "update with 4 microbatches, and no fewer with 1; one of them at most was beside the gradients",
        "one microbatch at a time: no graph was held while another one was made",
        "one step of the optimizer an update, and what stood in .grad before did not count",
    ]


def _named(*functions: Callable, kinds: tuple[str, ...]) -> tuple[GroupMistake, ...]:
    return tuple(GroupMistake(f.__name__, f, kinds) for f in functions)


MISTAKES = (
    *_named(*mistakes.OF_STEPS, *mistakes.OF_VALUES, kinds=("values",)),
    *_named(*ways.OF_MEMORY, kinds=("memory",)),
    *_named(*ways.OF_TRAFFIC, kinds=("traffic",)),
    *_named(*ways.OF_CALLS, kinds=("calls",)),
    *_named(*ways.OF_SMALL, kinds=("small",)),
    *_named(*ways.OF_HANGS, kinds=("hangs", "ended", "raised")),
)
SPEC = GroupSpec("07_torch_ddp", "accumulate", 5, cases, compare, MISTAKES, praise, "uneven")
