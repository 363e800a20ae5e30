"""Mistakes in what the ranks start from, each with the sentence that names it."""

import torch

from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.training_seen import Seen, close, complete


def _starts(e: Evidence, wrong: Wrong) -> tuple[Seen, list[dict[str, torch.Tensor]]]:
    seen = Seen(e, wrong.case)
    return seen, [{n: answer.tensors[f"start/{n}"] for n in seen.truth.start} for answer in seen.answers]


def _same(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names=None) -> bool:
    return all(torch.equal(some[name], other[name]) for name in names or some)


def no_buffers(e: Evidence, wrong: Wrong) -> str | None:
    seen, starts = _starts(e, wrong)
    with_buffers = next(complete(e, group="norm"), None)
    if with_buffers is None or wrong.case != with_buffers.number:
        return None
    parameters = [name for name in seen.truth.start if name in seen.truth.nbytes]
    if all(_same(start, seen.truth.start, parameters) for start in starts):
        other = [n for n, want in seen.truth.start.items() if not all(torch.equal(start[n], want) for start in starts)]
        return (
            f"The parameters are those of rank 0, of the buffers {', '.join(other)} not. BatchNorm keeps its running "
            "statistics in buffers, and evaluation uses them: broadcast all of module.buffers(), too."
        )
    return None


def frozen_not_broadcast(e: Evidence, wrong: Wrong) -> str | None:
    seen, starts = _starts(e, wrong)
    if seen.case.group == "frozen" and all(_same(s, seen.truth.start, list(seen.truth.nbytes)) for s in starts):
        return (
            "Parameters that are learned were broadcast, frozen ones were not. A frozen parameter gets no gradient, "
            "but forward uses it: it must be the same on all ranks."
        )
    return None


def no_broadcast(e: Evidence, wrong: Wrong) -> str | None:
    seen, starts = _starts(e, wrong)
    if seen.case.world > 1 and all(_same(s, b) for s, b in zip(starts, seen.truth.built, strict=True)):
        return (
            "Each rank starts from its own weights. The average of the gradients of different models is no gradient of "
            "any of them: broadcast all parameters and buffers from rank 0 once, when the wrapper is made."
        )
    return None


def wrong_source(e: Evidence, wrong: Wrong) -> str | None:
    seen, starts = _starts(e, wrong)
    for rank in seen.ranks[1:]:
        if all(_same(s, seen.truth.built[rank]) for s in starts):
            return f"All ranks start from the weights of rank {rank}: broadcast with src=0."
    return None


def reseeds(e: Evidence, wrong: Wrong) -> str | None:
    seen, starts = _starts(e, wrong)
    if seen.case.world > 1 and not all(_same(s, starts[0]) for s in starts):
        return None
    mean = {n: sum(b[n] for b in seen.truth.built) / seen.case.world for n in seen.truth.nbytes}
    if seen.case.world > 1 and all(close(starts[0][name], value) for name, value in mean.items()):
        how = "they are the mean over the ranks"
    else:
        how = "they were made anew"
    return (
        f"All ranks start equal, but not from the weights with which rank 0 came: {how}. That would throw away a "
        "loaded checkpoint. Leave the module as it is, and broadcast it from rank 0."
    )


STARTS = known(frozen_not_broadcast, no_buffers, no_broadcast, wrong_source, reseeds, kinds=("start",))
