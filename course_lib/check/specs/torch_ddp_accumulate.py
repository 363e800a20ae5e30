"""Exercise 07, first part: one update from several microbatches. Judged: gradients, weights, bytes, updates."""

import random
from collections.abc import Callable

import torch

from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, GroupCase, GroupMistake, GroupSpec, Wrong
from course_lib.check.specs import torch_ddp_accumulate_mistakes as mistakes
from course_lib.check.specs.torch_ddp_drive import CLASSES, FEATURES, drive_accumulate
from course_lib.check.specs.torch_ddp_oracle import Update, differ, gradient_bytes, right_updates
from course_lib.launch import Message

EXTRA = 512  # bytes besides gradients that may be: counts of samples, losses to print. Fewer than the gradients have


MADE = "torch_ddp_drive.py, "  # where DDP is made


def _case(group: str, sizes: list[list[list[int]]], generator: torch.Generator, note: str) -> GroupCase:
    inputs = []
    for of_rank in sizes:
        total = sum(map(sum, of_rank))
        samples = torch.randn(total, FEATURES + 1, generator=generator, dtype=torch.float64)
        samples[:, -1] = torch.randint(CLASSES, (total,), generator=generator)
        inputs.append(samples)
    world, first = len(sizes), [of_rank[0] for of_rank in sizes]
    told = ", ".join(f"rank {rank}: {'+'.join(map(str, of_update))}" for rank, of_update in enumerate(first))
    story = f"{world} rank{'s' * (world > 1)}, {note} (samples in the first update: {told})"
    nothing = (torch.zeros(0),) * world
    return GroupCase(group, story, tuple(inputs), nothing, {"sizes": sizes}, drive=drive_accumulate)


def cases(rng: random.Random) -> list[GroupCase]:
    """Uneven microbatches on three ranks, one microbatch, and a rank that has run out of samples."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))

    def some() -> int:
        return rng.randint(2, 6)

    # The first and the last microbatch differ in length, and so do the ranks: else wrong divisors would be right.
    # And four on three ranks, so that a division by one of these numbers is not taken for one by the other.
    uneven = [[[7 + rank, some(), some(), 1 + rank] for _ in range(3)] for rank in range(3)]
    single = [[[3 + rank] for _ in range(2)] for rank in range(3)]
    tail = [[[4, 3]], [[5, 0]]]
    return [
        _case("uneven", uneven, generator, "4 microbatches each"),
        _case("single", single, generator, "1 microbatch each"),
        _case("tail", tail, generator, "2 microbatches each"),
    ]


def updates(e: Evidence, number: int) -> list[list[Update]]:
    """[update][rank]: what the ranks did."""
    found = []
    for rank, answer in enumerate(e.answers[number]):
        for k, steps in enumerate(answer.facts["steps"]):
            grads = [answer.tensors[f"grad {k} {step}"] for step in range(steps)]
            found.append((k, rank, Update(grads, answer.tensors[f"weights {k}"])))
    return [[u for k, _, u in found if k == wanted] for wanted in range(len(e.answers[number][0].facts["steps"]))]


def values(e: Evidence) -> Wrong | None:
    """The first update whose gradients or weights are not those of one process on all samples."""
    for number in e.numbers():
        case = e.cases[number]
        right = right_updates(case, e.answers[number][0].tensors["start"])
        for k, (of_ranks, want) in enumerate(zip(updates(e, number), right, strict=True)):
            for rank, got in enumerate(of_ranks):
                where = f"{case.story}: update {k}, rank {rank}: "
                if len(got.grads) != 1:
                    return Wrong("values", f"{where}optimizer.step() was called {len(got.grads)} times.", number)
                if text := differ(got.grads[0], want.grads[0], "the gradient"):
                    return Wrong("values", f"{where}when the optimizer steps, {text}", number)
                if text := differ(got.weights, want.weights, "the weights"):
                    return Wrong("values", f"{where}after it, {text}", number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """The gradients travel once an update."""
    for number in e.numbers():
        case = e.cases[number]
        count = len(e.answers[number][0].facts["steps"])
        for rank in range(case.world):
            sums = [m.nbytes for m in e.messages[number] if m.rank == rank and m.op == "all_reduce"]
            sent = sum(sums) - gradient_bytes()  # of the backward that came before, so that buckets are final
            if sent > count * (gradient_bytes() + EXTRA):
                return Wrong(
                    "traffic",
                    f"{case.story}: in {count} updates rank {rank} put {sent} bytes into all-reduces; the gradients "
                    f"have {gradient_bytes()} bytes, and should travel once an update.",
                    number,
                )
            other = [m for m in e.messages[number] if m.rank == rank and _by_other_ways(m)]
            if sum(m.nbytes for m in other) > count * EXTRA:
                most = max(other, key=lambda m: m.nbytes)
                text = f"rank {rank} sends {most.nbytes} bytes by {most.op} ({most.where})"
                detail = "Gradients, and nothing else of their size, travel through DDP's all-reduce."
                return Wrong("traffic", f"{case.story}: {text}.", number, detail)
    return None


def _by_other_ways(m: Message) -> bool:
    """Neither an all-reduce nor what DDP sends when it is made."""
    return m.op not in ("all_reduce", "barrier") and "recv" not in m.op and not m.where.startswith(MADE)


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, values, ended_badly, traffic):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    number = e.numbers(group="uneven")[0]
    sums = [m for m in e.messages[number] if m.rank == 0 and m.op == "all_reduce" and m.nbytes > 64]
    return [
        "gradients and weights equal those of one process on all samples, after each update, to 10 digits "
        f"({len(e.cases)} cases, 2 and 3 ranks, uneven microbatches, one of them empty)",
        f"bytes: the gradients ({gradient_bytes()} bytes) travelled once an update, in {len(sums)} all-reduces for 3 "
        "updates of 4 microbatches and the one that the check began with",
        "one step of the optimizer an update",
    ]


def _named(*functions: Callable, kinds: tuple[str, ...]) -> tuple[GroupMistake, ...]:
    return tuple(GroupMistake(f.__name__, f, kinds) for f in functions)


MISTAKES = (
    *_named(*mistakes.OF_STEPS, *mistakes.OF_VALUES, kinds=("values",)),
    *_named(*mistakes.OF_TRAFFIC, kinds=("traffic",)),
    *_named(*mistakes.OF_HANGS, kinds=("hangs", "ended", "raised")),
)
SPEC = GroupSpec("07_torch_ddp", "accumulate", 5, cases, compare, MISTAKES, praise, "uneven")
