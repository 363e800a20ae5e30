"""The usual mistakes in data parallelism by hand that are not in `training_starts` and `training_gradients`."""

from itertools import combinations

from course_lib.check import known as known_mistakes
from course_lib.check.findings import errors
from course_lib.check.group import KINDS, Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.training_gradients import GRADIENTS
from course_lib.check.specs.training_order import (
    barrier_between,
    broadcast_on_some_ranks,
    order_of_arrival,
    other_size,
    skips_unused,
)
from course_lib.check.specs.training_seen import Seen
from course_lib.check.specs.training_starts import STARTS


def ready_made(e: Evidence, wrong: Wrong) -> str | None:
    return "A finished wrapper does the work here. Write it yourself, from dist.broadcast and dist.all_reduce."


def destroys_group(e: Evidence, wrong: Wrong) -> str | None:
    gone = any("Default process group has not been initialized" in answer.error_text for _, answer in errors(e))
    return known_mistakes.destroys_group(e, wrong) if gone or wrong.kind == "destroyed" else None


def hides_parameters(e: Evidence, wrong: Wrong) -> str | None:
    if any("model.parameters() must give the parameters" in answer.error_text for _, answer in errors(e)):
        return "Wrap the module itself. A copy of it would be trained, and the module of the caller would not."
    return None


def no_return(e: Evidence, wrong: Wrong) -> str | None:
    if any("must give the output of the module" in answer.error_text for _, answer in errors(e)):
        return "forward() must hand on what the module gives: return self.module(*args, **kwargs)."
    return None


# Parameters without a gradient.


def none_error(e: Evidence, wrong: Wrong, group: str) -> bool:
    """A rank stumbled over a gradient that is None, in a case of this group."""
    types = ("AttributeError", "TypeError")
    found = any("None" in answer.error_text and answer.error in types for _, answer in errors(e))
    return found and wrong.kind == "raised" and e.cases[wrong.case].group == group


def frozen_crash(e: Evidence, wrong: Wrong) -> str | None:
    if none_error(e, wrong, "frozen"):
        return "A frozen parameter (requires_grad=False) never gets a gradient, its .grad is None: leave it out."
    return None


def unused_crash(e: Evidence, wrong: Wrong) -> str | None:
    if none_error(e, wrong, "branch"):
        return (
            "A parameter that this rank did not use in this step has no gradient: .grad is None. Others may have used "
            "it and wait for this rank: take part with zeros."
        )
    return None


# Traffic.

REDUCES = ("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")


def gathers_more_than_shards(seen: Seen, rank: int, step: int) -> bool:
    """Each rank brings more than its share of the gradients, each of which may be padded."""
    gathered = sum(m.nbytes for m in seen.step(rank, step) if m.op in GATHERS)
    return gathered * seen.case.world > seen.nbytes + 8 * seen.case.world * len(seen.truth.nbytes)


def gathers_everything(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    found = [m for m in seen.step(0, 0) if "all_gather" in m.op]
    if found and (gathers_more_than_shards(seen, 0, 0) or "object" in found[0].op):
        return (
            f"{found[0].op} brings all gradients of all ranks to every rank: each receives (N-1)·M bytes, which grows "
            "with N, and an all-reduce needs 2(N-1)/N·M, less than 2M. Use dist.all_reduce."
        )
    return None


def through_one_rank(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    calls = seen.step(0, 0)
    if any(m.op in ("reduce", "gather", "scatter") for m in calls):
        return "All gradients pass through one rank, whose link becomes the bottleneck. Use dist.all_reduce."
    return None


def sent_again(seen: Seen, rank: int, step: int) -> int:
    """Bytes of the broadcasts of a step, if they are more than the buffers have; else 0."""
    spread = sum(m.nbytes for m in seen.step(rank, step) if m.op == "broadcast")
    return spread if spread > seen.buffers else 0


def spread_again(seen: Seen, rank: int, step: int) -> str | None:
    """The same in words. In the first step a wrapper may still get ready."""
    if step and (spread := sent_again(seen, rank, step)):
        return f"broadcasts of {spread} bytes; the buffers have {seen.buffers} bytes."
    return None


def broadcasts_again(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    steps = [step for step in seen.steps if step and sent_again(seen, 0, step)]
    if not steps:
        return None
    when = "every step" if len(steps) == len(seen.steps) - 1 else f"step{'s' * (len(steps) > 1)} {_listed(steps)}"
    kinds = seen.spread(0, steps) - {"buffer"}
    once = "one broadcast, when the wrapper is made, is enough. (Buffers may go again: each rank computes its own.)"
    if kinds == {"frozen"}:
        return f"Frozen parameters are sent again in {when}. Nothing changes them: {once}"
    if kinds and kinds <= {"frozen", "learned"}:
        return f"The parameters are sent again in {when}. Equal weights and equal gradients stay equal: {once}"
    if kinds == {"gradient"}:
        return _spreads_gradients(seen, steps[0], when)
    return (
        f"More than the buffers is broadcast in {when}. In a step gradients travel by all-reduces; of the parameters, "
        f"{once}"
    )


def _spreads_gradients(seen: Seen, step: int, when: str) -> str:
    text = f"Gradients are broadcast in {when}. "
    if any(m.op in REDUCES for m in seen.step(0, step)):
        return text + "An all-reduce gives the same result to all ranks: leave the broadcast out."
    return text + "So they come from one rank, whose link becomes the bottleneck. Use dist.all_reduce."


def needless_barrier(e: Evidence, wrong: Wrong) -> str | None:
    if ": barrier (" in wrong.text:
        return (
            "A barrier carries no gradient, and makes each rank wait for the slowest once more. Leave it out: an "
            "all-reduce ends only when all ranks take part."
        )
    return None


def _listed(steps: list[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, steps[:-1])), str(steps[-1])]))


def too_few(seen: Seen, rank: int, step: int) -> str | None:
    """Fewer all-reduces than there are gradients; None when there are none at all: then messages do the work."""
    needed, reduced = seen.needed(step), [m for m in seen.step(rank, step) if m.op in REDUCES]
    if not reduced or len(reduced) >= len(needed):
        return None
    found = (
        f"{len(reduced)} call{'s' * (len(reduced) > 1)} of {reduced[0].op} with {sum(m.nbytes for m in reduced)} bytes"
    )
    return f"{found} in all; there are {len(needed)} gradients."


def not_one_each(e: Evidence, wrong: Wrong) -> str | None:
    if too_few(Seen(e, wrong.case), 0, 0):
        return (
            "Several gradients share an all-reduce: that is a bucket (one flat tensor, or one call for a list). It is "
            "right, with small gradients it is quicker, and exercise 06 asks for it. This one asks for an all-reduce "
            "for each gradient: dist.all_reduce(parameter.grad)."
        )
    return None


def not_by_collectives(e: Evidence, wrong: Wrong) -> str | None:
    if "in all calls of torch.distributed" in wrong.text:
        return (
            "The gradients did not travel by collectives of the group, but some other way (a file, a store, a "
            "connection of your own). Use dist.all_reduce."
        )
    return None


def sends_frozen(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    frozen = [nbytes for nbytes, learned in seen.parameters.values() if not learned]
    sums = {sum(some) for count in range(1, len(frozen) + 1) for some in combinations(frozen, count)}
    if seen.reduced - seen.nbytes in sums:
        return "Frozen parameters take part. No rank has a gradient for them: leave out what has requires_grad=False."
    return None


# Handles and bits.


def never_waited(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.detail == "open":
        return (
            "Keep the handle that all_reduce(..., async_op=True) returns, and call its wait() in synchronize(), before "
            "the optimizer reads the gradients."
        )
    return None


def never_cleared(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.detail == "kept":
        return (
            "A list of handles grows in every step, and with it the memory: each handle keeps its tensor. Empty the "
            "list in synchronize(), when all are over."
        )
    return None


def divides_before_wait(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.detail == "touched":
        return (
            "While an all-reduce is under way its tensor belongs to the backend, which reads and writes it at any "
            "moment. Call wait() first; divide before the all-reduce starts, or after wait()."
        )
    return None


def different_order(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "Each rank has added the gradients in its own order, and rounding depends on the order: the models drift "
        "apart, and nobody is told. dist.all_reduce gives the same bits to all ranks."
    )


FIRST = (
    *known(ready_made, kinds=("ready_made",)),
    *known(destroys_group, kinds=("destroyed", "raised", "ended")),
    *known(hides_parameters, no_return, kinds=KINDS),
    *STARTS,
    *known(barrier_between, broadcast_on_some_ranks, kinds=("hangs", "ended", "raised")),
)
CRASHES = known(frozen_crash, unused_crash, kinds=("raised",))
LAST = (
    *known(skips_unused, kinds=("values", "hangs", "ended", "raised")),
    *known(never_waited, divides_before_wait, never_cleared, kinds=("handles",)),
    *known(different_order, kinds=("bits",)),
    *known(not_by_collectives, needless_barrier, gathers_everything, through_one_rank, kinds=("traffic",)),
    *known(broadcasts_again, sends_frozen, kinds=("traffic",)),
)
OWN = (
    *known(other_size, order_of_arrival, kinds=("hangs", "ended", "raised")),
    *known(not_one_each, kinds=("traffic",)),
)
MISTAKES = (*FIRST, *CRASHES, *GRADIENTS, *OWN, *LAST)
