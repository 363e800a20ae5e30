"""The usual mistakes in gradient accumulation. Most have a formula: what the gradient would be if it was this one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.torch_ddp_oracle import Parts, close, gradient_bytes, parts_at, right_updates

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
    return (
        "When the optimizer steps, there are no gradients: backward was not called, or zero_grad() came after it. Call "
        "optimizer.zero_grad() before the first microbatch, or after the step."
    )


def _formula(text: str, formula: Formula) -> Callable[[Callable], Callable[[Evidence, Wrong], str | None]]:
    """A mistake by its formula; `text` may use {update}."""

    def named(marker: Callable) -> Callable[[Evidence, Wrong], str | None]:
        def says(e: Evidence, wrong: Wrong) -> str | None:
            found = seen(e, wrong)
            return text.format(update=found.update) if found and found.fits(formula) else None

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


def never_zeroes(e: Evidence, wrong: Wrong) -> str | None:
    found = seen(e, wrong)
    if found is None or found.update == 0:
        return None
    before = [answer.tensors[f"grad {found.update - 1} 0"] for answer in e.answers[wrong.case]]
    if all(close(got - old, found.parts.right) for got, old in zip(found.got, before, strict=True)):
        return (
            f"Update {found.update} has its own gradient plus that of the update before: zero_grad() is missing. Call "
            "it once an update."
        )
    return None


OF_STEPS = (steps_each_time, no_step, zeroed_before_step)
OF_VALUES = (
    calls_module, never_synchronises, synchronises_the_first, synchronises_all_but_the_last, zeroes_each_microbatch,
    zeroes_each_microbatch_of_means, mean_of_means, sum_of_means, divides_by_local_count, forgets_world_size,
    sums_over_ranks, local_count_times_world, not_divided, count_of_each_microbatch, mean_of_each_microbatch,
    divides_by_microbatches, takes_equal_sizes, never_zeroes,
)  # fmt: skip


def no_sync_around_backward_only(e: Evidence, wrong: Wrong) -> str | None:
    facts = e.answers[wrong.case][0].facts
    if not facts["entered"] or facts["inside"]:
        return None
    return (
        "no_sync() is around backward only. DDP decides in forward whether the backward will be synchronised: put both "
        "inside."
    )


def no_no_sync(e: Evidence, wrong: Wrong) -> str | None:
    if e.answers[wrong.case][0].facts["entered"]:
        return None
    return (
        "The values are right, but DDP sends all gradients after each microbatch. Put forward and backward of all "
        "microbatches but the last into `with model.no_sync():`."
    )


def sends_another_way(e: Evidence, wrong: Wrong) -> str | None:
    return wrong.detail or None


def synchronises_too_often(e: Evidence, wrong: Wrong) -> str | None:
    facts, case = e.answers[wrong.case][0].facts, e.cases[wrong.case]
    updates = case.options["sizes"][0]
    micro = sum(len(of_update) - 1 for of_update in updates)
    if not 0 < facts["inside"] < micro:
        return None
    return (
        f"In {len(updates)} updates {facts['inside']} forwards were in no_sync(), and {micro} belong there: those of "
        "all microbatches but the last."
    )


def averages_again(e: Evidence, wrong: Wrong) -> str | None:
    facts, case = e.answers[wrong.case][0].facts, e.cases[wrong.case]
    micro = sum(len(of_update) - 1 for of_update in case.options["sizes"][0])
    if facts["inside"] < micro:
        return None
    return (
        f"The gradients travel again after DDP has averaged them ({gradient_bytes()} bytes an update would do). Leave "
        "the all-reduce of gradients to DDP."
    )


OF_TRAFFIC = (
    sends_another_way, no_sync_around_backward_only, no_no_sync, synchronises_too_often, averages_again,
)  # fmt: skip


def skips_empty_microbatch(e: Evidence, wrong: Wrong) -> str | None:
    if e.cases[wrong.case].group != "tail":
        return None
    return (
        "It happens only where rank 1 has a microbatch without samples. The others wait for its all-reduce: let it run "
        "forward and backward all the same (the sum of no losses is 0, and so is its gradient), and divide by the "
        "number of samples of all ranks, which is not 0."
    )


OF_HANGS = (skips_empty_microbatch,)
