"""The usual mistakes in gradient accumulation. Most have a formula: what the gradient would be if it was this one."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch

from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.torch_ddp_drive import LEFT_OVER
from course_lib.check.specs.torch_ddp_oracle import Parts, close, parts_at, right_updates

Formula = Callable[[Parts, int], torch.Tensor]  # (the parts, rank) -> the gradient of that rank


@dataclass(frozen=True)
class Seen:
    """The first update with a wrong gradient: its number, the parts, and the gradients of the ranks' first step."""

    update: int
    parts: Parts
    got: list[torch.Tensor]

    def fits(self, formula: Formula) -> bool:
        """All ranks have what the formula says, and it is not the right gradient."""
        pairs = [(got, formula(self.parts, rank)) for rank, got in enumerate(self.got)]
        return all(close(got, want) for got, want in pairs) and not close(pairs[0][1], self.parts.right)


def _remembered(look: Callable[[Evidence, Wrong], "Seen | None"]) -> Callable[[Evidence, Wrong], "Seen | None"]:
    """What was seen last: all mistakes ask about the same evidence, one after the other."""
    last: list = [None, None, None]

    def seen(e: Evidence, wrong: Wrong) -> Seen | None:
        if last[0] is not e or last[1] is not wrong:
            last[:] = e, wrong, look(e, wrong)
        return last[2]

    return seen


@_remembered
def seen(e: Evidence, wrong: Wrong) -> Seen | None:
    """None when gradients are right, or some rank made no step."""
    case, answers = e.cases[wrong.case], e.answers[wrong.case]
    weights = answers[0].tensors["start"]
    for k, right in enumerate(right_updates(case, weights)):
        if any(f"grad {k} 0" not in answer.tensors for answer in answers):
            return None
        got = [answer.tensors[f"grad {k} 0"] for answer in answers]
        if not all(close(found, right.grads[0]) for found in got):
            return Seen(k, parts_at(case, weights, k), got)
        weights = right.weights
    return None


def _steps(e: Evidence, wrong: Wrong) -> list[int]:
    return e.answers[wrong.case][0].facts["steps"]


def steps_each_time(e: Evidence, wrong: Wrong) -> str | None:
    if max(_steps(e, wrong)) < 2:
        return None
    return (
        f"The optimizer stepped {max(_steps(e, wrong))} times in one update. Then these are several updates with small "
        "batches, not one with a large one: call optimizer.step() once, after the last microbatch."
    )


def no_step(e: Evidence, wrong: Wrong) -> str | None:
    if any(_steps(e, wrong)):
        return None
    return "step() of the optimizer that was passed in was never called. Call it after the last microbatch."


def zeroed_before_step(e: Evidence, wrong: Wrong) -> str | None:
    found = seen(e, wrong)
    if found is None or not all(bool((got.isnan() | (got == 0)).all()) for got in found.got):
        return None
    made = [answer.facts["backwards"][found.update] for answer in e.answers[wrong.case]]
    if not any(count for count, _ in made):
        return "When the optimizer steps, there are no gradients: no backward came through the model before it."
    if not any(other_than_0 for _, other_than_0 in made):
        return None
    return (
        "When the optimizer steps, there are no gradients, though backward made some: zero_grad() came after it. Call "
        "optimizer.zero_grad() once, before the first microbatch."
    )


def not_each_backward(e: Evidence, wrong: Wrong) -> str | None:
    """Each microbatch went forward, and not through all came a backward."""
    found = seen(e, wrong)
    for rank, answer in enumerate(e.answers[wrong.case]) if found else ():
        micro, made = len(found.parts.counts[rank]), answer.facts["backwards"][found.update][0]
        if len(answer.facts["passes"][found.update]) >= micro > made > 0:
            return (
                f"Rank {rank} had {micro} microbatches go forward, and {made} backward. Each loss has a graph of its "
                "own: call backward in the loop, for each microbatch; .grad adds up."
            )
    return None


def factor_of_0(e: Evidence, wrong: Wrong) -> str | None:
    found = seen(e, wrong)
    made = [answer.facts["backwards"][found.update] for answer in e.answers[wrong.case]] if found else []
    if not made or any(other_than_0 for _, other_than_0 in made) or not all(count for count, _ in made):
        return None
    return (
        "backward was called, and what came to the model's results was 0 everywhere, as when a loss is multiplied by "
        "0. With whole numbers N // count is 0: divide by /."
    )


def backwards_too_late(e: Evidence, wrong: Wrong) -> str | None:
    """Some microbatches were averaged, the others not, and forwards had gone ahead of backwards."""
    found = seen(e, wrong)
    if found is None or not all(_went_ahead(answer.facts["passes"][found.update]) for answer in e.answers[wrong.case]):
        return None
    numbers = range(len(found.parts.counts[0]))
    for averaged in (set(chosen) for n in numbers[1:] for chosen in combinations(numbers, n)):
        if found.fits(lambda p, rank, averaged=averaged: _averaged(p, rank, averaged)):
            which = ", ".join(map(str, sorted(averaged)))
            return (
                f"Only microbatch{'es' * (len(averaged) > 1)} {which} (of 0 to {numbers[-1]}) took part in the average "
                "over the ranks, the others stayed on their rank. A forward outside of no_sync() lets the "
                "backward that comes next send, and here that was the backward of another microbatch, since forwards "
                "went ahead. Call backward for each microbatch, before the next forward."
            )
    return None


def _went_ahead(passes: list[list[int]]) -> bool:
    """A forward began while the graph of another one still waited for its backward."""
    return any(unused for _, unused, _ in passes)


def _averaged(p: Parts, rank: int, chosen: set[int]) -> torch.Tensor:
    """The gradient of a rank when these microbatches were averaged over the ranks, and the others stayed on theirs."""
    local = sum(part for k, part in enumerate(p.sums[rank]) if k not in chosen)
    return (p.total(lambda r, k: float(k in chosen)) + p.world * local) / p.count


def _formula(text: str, formula: Formula) -> Callable[[Callable], Callable[[Evidence, Wrong], str | None]]:
    """A mistake by its formula; `text` may use {world} and {ratio}, of its length to the right one's."""

    def named(marker: Callable) -> Callable[[Evidence, Wrong], str | None]:
        def says(e: Evidence, wrong: Wrong) -> str | None:
            found = seen(e, wrong)
            if found is None or not found.fits(formula):
                return None
            return text.format(world=found.parts.world, ratio=found.got[0].norm() / found.parts.right.norm())

        says.__name__ = marker.__name__
        return says

    return named


@_formula(
    "The gradient is that of the last microbatch alone: zero_grad() between the microbatches throws the others away. "
    "Call it once an update, before the first microbatch.",
    lambda p, rank: p.total(lambda r, k: k == len(p.counts[0]) - 1) / p.count,
)
def zeroes_each_microbatch() -> None: ...


@_formula(
    "The gradient is that of the last microbatch alone, and as its mean: zero_grad() between the microbatches throws "
    "the others away (and the mean of a microbatch is not weighed by its samples).",
    lambda p, rank: sum(s[-1] / max(c[-1], 1) for s, c in zip(p.sums, p.counts, strict=True)) / p.world,
)
def zeroes_each_microbatch_of_means() -> None: ...


_by_bare_module = _formula(
    "Each rank has the sum of its own gradients: model.module was called, and knows nothing of other ranks. Call "
    "model, the DDP around it, whose forward and backward average the gradients.",
    lambda p, rank: sum(p.sums[rank]) * p.world / p.count,
)(lambda: None)


def calls_module(e: Evidence, wrong: Wrong) -> str | None:
    return None if e.answers[wrong.case][0].facts["forwards"] else _by_bare_module(e, wrong)


@_formula(
    "Each rank has the sum of its own gradients: nothing was averaged. The last backward must not be in no_sync() "
    "(nor its forward), since it carries the sum of all microbatches.",
    lambda p, rank: sum(p.sums[rank]) * p.world / p.count,
)
def never_synchronises() -> None: ...


@_formula(
    "Only the first microbatch was averaged over the ranks, the others stayed on their rank. It is the other way "
    "round: no_sync() for all but the last, whose all-reduce carries what was gathered.",
    lambda p, rank: (p.total(lambda r, k: k == 0) + p.world * sum(p.sums[rank][1:])) / p.count,
)
def synchronises_the_first() -> None: ...


@_formula(
    "The last microbatch stayed on its rank, and each one before it was averaged. It is the other way round: no_sync() "
    "for all but the last, whose all-reduce carries what was gathered.",
    lambda p, rank: (p.total(lambda r, k: k < len(p.counts[0]) - 1) + p.world * p.sums[rank][-1]) / p.count,
)
def synchronises_all_but_the_last() -> None: ...


@_formula(
    "The gradient is too small by the number of microbatches. Their losses are sums, and their samples have been "
    "counted: do not divide by the number of microbatches, too.",
    lambda p, rank: p.right / len(p.counts[0]),
)
def divides_by_microbatches() -> None: ...


@_formula(
    "Each loss is the mean of its microbatch already, and was divided by the number of samples as well. Sums can be "
    'added: F.cross_entropy(..., reduction="sum").',
    lambda p, rank: p.total(lambda r, k: 1 / max(p.counts[r][k], 1)) / p.count,
)
def mean_and_count() -> None: ...


@_formula(
    "This is the mean of the microbatches' means: a sample of a short microbatch counts more than one of a long one. "
    "Take the sum of the losses, and divide by the number of samples of all microbatches on all ranks.",
    lambda p, rank: p.total(lambda r, k: 1 / max(p.counts[r][k], 1)) / (p.world * len(p.counts[0])),
)
def mean_of_means() -> None: ...


@_formula(
    "This is the sum of the microbatches' means: with K microbatches the gradient is about K times too large. Divide "
    "by the number of samples of all microbatches on all ranks, once.",
    lambda p, rank: p.total(lambda r, k: 1 / max(p.counts[r][k], 1)) / p.world,
)
def sum_of_means() -> None: ...


@_formula(
    "Each rank divided by its own number of samples, and DDP averaged that: a sample on a rank with few counts more "
    "than one on a rank with many. Add the numbers of all ranks with an all-reduce, divide by that, and multiply by "
    "the world size, because DDP divides by it.",
    lambda p, rank: p.total(lambda r, k: 1 / sum(p.counts[r])) / p.world,
)
def divides_by_local_count() -> None: ...


@_formula(
    "The gradient is too small by the number of ranks. If you average once more by hand: DDP has done it. If not: DDP "
    "divides the sum of the ranks' gradients by the world size, so multiply the loss by it.",
    lambda p, rank: p.right / p.world,
)
def forgets_world_size() -> None: ...


@_formula(
    "The gradient is too large by the number of ranks. DDP averages over the ranks already; multiply the loss by the "
    "world size only if you divide it by the number of samples of *all* ranks.",
    lambda p, rank: p.right * p.world,
)
def sums_over_ranks() -> None: ...


@_formula(
    "The loss was multiplied by the world size and divided by the samples of this rank only. Divide by those of all "
    "ranks: dist.all_reduce the number.",
    lambda p, rank: p.total(lambda r, k: 1 / sum(p.counts[r])),
)
def local_count_times_world() -> None: ...


@_formula(
    "The summed losses were not divided by the number of samples, so the gradient grows with the batch. Divide by the "
    "number of samples of all microbatches on all ranks.",
    lambda p, rank: p.total() / p.world,
)
def not_divided() -> None: ...


def counts_one_microbatch(e: Evidence, wrong: Wrong) -> str | None:
    """Of all ranks, but only of the first microbatch, or of another one."""
    found = seen(e, wrong)
    for k in range(len(found.parts.counts[0])) if found else ():
        count = sum(counts[k] for counts in found.parts.counts)
        if count and found.fits(lambda p, rank, count=count: p.total() / count):
            return (
                f"The summed losses were divided by {count}, the samples of microbatch {k} over the ranks. All "
                f"microbatches together have {found.parts.count}: count them all before the first backward."
            )
    return None


@_formula(
    "Each microbatch was divided by its own number of samples over the ranks. A short microbatch then counts as much "
    "as a long one: find the number of samples of all microbatches first.",
    lambda p, rank: p.total(lambda r, k: 1 / max(sum(c[k] for c in p.counts), 1)),
)
def count_of_each_microbatch() -> None: ...


@_formula(
    "Each microbatch was divided by its own number of samples over the ranks, and then by their number. A short "
    "microbatch then counts as much as a long one: find the number of samples of all microbatches first.",
    lambda p, rank: p.total(lambda r, k: 1 / max(sum(c[k] for c in p.counts), 1)) / len(p.counts[0]),
)
def mean_of_each_microbatch() -> None: ...


@_formula(
    "The number of samples was taken to be that of this rank's first microbatch, times microbatches, times ranks. They "
    "are not equal: add the real numbers, and dist.all_reduce them.",
    lambda p, rank: p.total(lambda r, k: 1 / (p.counts[r][0] * len(p.counts[r]) * p.world)),
)
def takes_equal_sizes() -> None: ...


@_formula(
    "The gradient is {ratio:.3g} times what it should be, as with a 2 where the number of ranks belongs; here are "
    "{world}. dist.get_world_size() tells it.",
    lambda p, rank: p.right * 2 / p.world,
)
def two_for_world_size() -> None: ...


def _left_over(e: Evidence, wrong: Wrong) -> bool:
    """Each gradient is off by the same number everywhere: that with which .grad was filled before, times a factor."""
    found = seen(e, wrong)
    if found is None:
        return False
    off = torch.stack([got - found.parts.right for got in found.got])
    return not close(off, torch.zeros_like(off)) and close(off, off.mean().expand_as(off))


def never_zeroes(e: Evidence, wrong: Wrong) -> str | None:
    if not _left_over(e, wrong) or e.answers[wrong.case][0].facts["zeroed"][0]:
        return None
    return (
        f"The check fills .grad with {LEFT_OVER} before each update, and that is still in the sum: zero_grad() is "
        "missing. Call it once an update, before the first microbatch."
    )


def zeroes_only_at_the_end(e: Evidence, wrong: Wrong) -> str | None:
    if not _left_over(e, wrong):
        return None
    return (
        f"The check fills .grad with {LEFT_OVER} before each update, and that is still in the sum: zero_grad() comes "
        "only after the step. Then an update is right if nobody has called backward before it, for example to look at "
        "a gradient. Call it before the first microbatch."
    )


def clips(e: Evidence, wrong: Wrong) -> str | None:
    """By length, or each element; a factor would be the same in the cases with small and with large gradients."""
    found = seen(e, wrong)
    if found is None or found.update:
        return None
    got, right = found.got[0], found.parts.right
    most = got.abs().max()
    if close(got, right.clamp(-most, most)):
        return (
            f"What is larger than {most:.3g} was cut off: clip_grad_value_, perhaps. It is not asked for here, and "
            "changes the gradient's direction."
        )
    length = got.norm()
    if length < right.norm() and close(got, right * (length / right.norm())) and _as_long_elsewhere(e, wrong, length):
        return (
            f"The gradient has the right direction, and the length {length:.3g} instead of {right.norm():.3g}: it was "
            "clipped, by clip_grad_norm_ perhaps. That is not asked for here."
        )
    return None


def _as_long_elsewhere(e: Evidence, wrong: Wrong, length: torch.Tensor) -> bool:
    """Small gradients were right, or the first gradients of another case have the same length, too."""
    others = [k for k in e.numbers() if k != wrong.case and "grad 0 0" in e.answers[k][0].tensors]
    same = [abs(e.answers[k][0].tensors["grad 0 0"].norm() / length - 1) < 1e-3 for k in others]
    return e.cases[wrong.case].options["loud"] > 1 or any(same)


def lower_precision(e: Evidence, wrong: Wrong) -> str | None:
    found = seen(e, wrong)
    if found is None:
        return None
    off = max(float((got - found.parts.right).abs().max()) for got in found.got) / float(found.parts.right.abs().max())
    if not off < 1e-2:
        return None
    text = f"The gradient is right but for {off:.0e} of its largest element, as after a rounding to "
    if off > 1e-6:
        return f"{text}float16 or bfloat16, which have 11 and 8 bits. The model is float64: convert nothing."
    return (
        f"{text}float32, which has 24 bits. The model is float64: convert nothing. And a number divided by a tensor of "
        "whole numbers is float32: multiply the loss by the world size first, then divide by the count, or take "
        "count.item()."
    )


OF_STEPS = (steps_each_time, no_step, zeroed_before_step, factor_of_0)
OF_VALUES = (
    calls_module, not_each_backward, mean_and_count, never_synchronises, backwards_too_late, synchronises_the_first,
    synchronises_all_but_the_last, zeroes_each_microbatch, zeroes_each_microbatch_of_means, mean_of_means, sum_of_means,
    divides_by_local_count, forgets_world_size, sums_over_ranks, local_count_times_world, not_divided,
    counts_one_microbatch, count_of_each_microbatch, mean_of_each_microbatch, divides_by_microbatches,
    takes_equal_sizes, two_for_world_size, never_zeroes, zeroes_only_at_the_end, clips, lower_precision,
)  # fmt: skip
