"""The usual mistakes in data parallelism by hand, each with the sentence that names it."""

from collections.abc import Callable

import torch

from course_lib.check import known as known_mistakes
from course_lib.check.findings import errors
from course_lib.check.group import KINDS, Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.training import TIED
from course_lib.check.specs.training_seen import FORWARD, Seen, close, complete, first_off


def ready_made(e: Evidence, wrong: Wrong) -> str | None:
    return "A finished wrapper does the work here. Write it yourself, from dist.broadcast and dist.all_reduce."


def destroys_group(e: Evidence, wrong: Wrong) -> str | None:
    gone = any("Default process group has not been initialized" in answer.error_text for _, answer in errors(e))
    return known_mistakes.destroys_group(e, wrong) if gone or wrong.kind == "destroyed" else None


def hides_parameters(e: Evidence, wrong: Wrong) -> str | None:
    if any("model.parameters() must give the parameters" in answer.error_text for _, answer in errors(e)):
        return "Wrap the module itself. A copy of it would be trained, and the module of the caller would not."
    return None


# What the ranks start from.


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
        return (
            "The parameters are those of rank 0, the buffers are not. BatchNorm keeps its running statistics in "
            "buffers, and evaluation uses them: broadcast module.buffers(), too."
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


# Gradients.

In = Callable[[Seen, int], str | None]


def at_first_off(looks_like: In, name: str) -> Callable[[Evidence, Wrong], str | None]:
    """A mistake that shows in the step in which a gradient is wrong first: until then weights are right."""

    def says(e: Evidence, wrong: Wrong) -> str | None:
        off = first_off(e)
        return looks_like(off.seen, off.step) if off and off.kind == "grad" else None

    says.__name__ = name
    return says


def averages_weights(e: Evidence, wrong: Wrong) -> str | None:
    """Weights that differed after a step are their mean at the end of the next one's backward."""
    for seen in complete(e):
        for step in seen.steps[1:]:
            for name in seen.truth.grad:
                before = [seen.value("weight", rank, name, step - 1) for rank in seen.ranks]
                after = [seen.value("held", rank, name, step) for rank in seen.ranks]
                mean = sum(before) / len(before)
                if not close(before[0], mean) and all(close(value, mean) for value in after):
                    return (
                        f"The weights are averaged, the gradients are not: after step {step - 1} {name} differs "
                        "between ranks, and in the next step it is their mean. (The argument of a hook of "
                        "register_post_accumulate_grad_hook is the parameter: take its .grad.) With an optimizer that "
                        "is not linear in the gradient, such as Adam, that trains another model."
                    )
    return None


def averages_outputs(e: Evidence, wrong: Wrong) -> str | None:
    off = first_off(e)
    sent = off.seen.phase(0, off.step, FORWARD, "all_reduce") if off else []
    if sent:
        return (
            f"Forward calls all_reduce ({sent[0].where}): the outputs or the loss are averaged. Backward knows nothing "
            "of that: every rank still computes the gradient of its own batch. Average the gradients, after backward."
        )
    return None


def only_first_step(seen: Seen, step: int) -> str | None:
    right = step > 0 and seen.case.group != "branch"
    if right and seen.grads_are(step, seen.local(step)):
        return (
            "The first step is right; from step 1 on each rank keeps its own gradients. Something is done once, or "
            "counted once, and must begin again in each step."
        )
    return None


def tied_twice(e: Evidence, wrong: Wrong) -> str | None:
    """Two names, one tensor: with sums it is wrong, with means it is one all-reduce too many."""
    seen = Seen(e, wrong.case)
    if seen.case.group != "tied":
        return None
    if wrong.kind == "values":
        off = first_off(e)
        others = [name for name in seen.truth.grad if name not in TIED]
        if off.name not in TIED or not seen.grads_are(off.step, seen.mean(off.step), others):
            return None
    elif seen.reduced < seen.nbytes + seen.truth.nbytes[TIED[0]]:
        return None
    return (
        "2.weight, 4.weight and 6.weight are names of one tensor, and it is reduced once for each name. "
        "module.parameters() gives every tensor once."
    )


def not_copied_back(seen: Seen, step: int) -> str | None:
    factor = next((f for f in (1.0, 1 / seen.case.world) if seen.grads_are(step, seen.local(step, f))), None)
    if seen.case.world > 1 and factor and sum(m.nbytes for m in seen.step(0, step, "all_reduce")) >= seen.nbytes:
        return (
            f"{seen.reduced} bytes were all-reduced, and .grad still holds what each rank computed itself: the sum "
            "stands in another tensor. torch.cat, clone() and arithmetic make new ones; copy the result back into "
            ".grad (after wait(), if it is asynchronous)."
        )
    return None


def no_average(seen: Seen, step: int) -> str | None:
    if seen.case.world > 1 and seen.grads_are(step, seen.local(step)):
        return "Each rank has the gradient of its own batch. Average it over all ranks in synchronize()."
    return None


def sums(seen: Seen, step: int) -> str | None:
    if seen.grads_are(step, seen.mean(step, seen.case.world)):
        return (
            f"The gradients are the sum over the {seen.case.world} ranks. The loss of the whole batch is the mean over "
            "all samples, so divide by the world size: else the learning rate grows with the number of ranks."
        )
    return None


def divides_twice(seen: Seen, step: int) -> str | None:
    if seen.grads_are(step, seen.mean(step, 1 / seen.case.world)):
        return f"The gradients are {seen.case.world} times too small: divide by the world size once, before or after."
    return None


def wrong_divisor(seen: Seen, step: int) -> str | None:
    for factor in (2.0, 4.0, 8.0, float(len(seen.case.inputs[0][0])), len(seen.truth.grad)):
        if seen.grads_are(step, seen.mean(step, seen.case.world / factor)):
            return (
                f"The sum over {seen.case.world} ranks was divided by {factor:g}. Divide by dist.get_world_size(): "
                "each rank's loss is already the mean over its own samples."
            )
    return None


def mean_of_users(seen: Seen, step: int) -> str | None:
    """Who has no gradient counts as a rank, with zero."""

    def over_users(rank: int, name: str) -> torch.Tensor:
        users = sum(not bool(local[name][step].isnan().any()) for local in seen.truth.local)
        return seen.truth.grad[name][step] * seen.case.world / max(users, 1)

    if seen.case.group == "branch" and seen.grads_are(step, over_users):
        return (
            "A parameter that some ranks did not use was divided by the number of ranks that did. Divide by the world "
            "size: on the others its gradient is zero, which belongs into the mean."
        )
    return None


# Parameters without a gradient.


def _none_error(e: Evidence, wrong: Wrong, group: str) -> bool:
    types = ("AttributeError", "TypeError")
    found = any("None" in answer.error_text and answer.error in types for _, answer in errors(e))
    return found and wrong.kind == "raised" and e.cases[wrong.case].group == group


def frozen_crash(e: Evidence, wrong: Wrong) -> str | None:
    if _none_error(e, wrong, "frozen"):
        return "A frozen parameter (requires_grad=False) never gets a gradient, its .grad is None: leave it out."
    return None


def unused_crash(e: Evidence, wrong: Wrong) -> str | None:
    if _none_error(e, wrong, "branch"):
        return (
            "A parameter that this rank did not use in this step has no gradient: .grad is None. Others may have used "
            "it and wait for this rank: take part with zeros."
        )
    return None


def skips_unused(e: Evidence, wrong: Wrong) -> str | None:
    """The ranks did not make the same all-reduces, where they do not use the same parameters."""
    seen = Seen(e, wrong.case)
    if seen.case.group != "branch" or seen.case.world == 1:
        return None
    sizes = [[m.nbytes for m in seen.calls(rank, "all_reduce")] for rank in seen.ranks]
    shortest = min(map(len, sizes))
    if all(found[:shortest] == sizes[0][:shortest] for found in sizes) and wrong.kind == "values":
        return None
    used = [sum(not bool(v[0].isnan().any()) for v in local.values()) for local in seen.truth.local]
    return (
        "Ranks take different branches here, so they have different gradients: in step 0 "
        + ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(used))
        + f" of {len(seen.truth.grad)}. Who leaves out an all-reduce that others make lets them wait for ever, or adds "
        "what does not belong together. All ranks must make the same calls: with zeros where there is no gradient."
    )


# Traffic.


def gathers_everything(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    if found := [m for m in seen.step(0, 0) if "gather" in m.op]:
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


def broadcasts_each_step(e: Evidence, wrong: Wrong) -> str | None:
    if "broadcasts of" in wrong.text:
        return (
            "The parameters are sent in every step. Equal weights and equal gradients stay equal: one broadcast, when "
            "the wrapper is made, is enough. (Buffers may go again: each rank computes its own.)"
        )
    return None


def sends_frozen(e: Evidence, wrong: Wrong) -> str | None:
    if Seen(e, wrong.case).case.group == "frozen":
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


def _at(*looks: In) -> list:
    return known(*(at_first_off(look, look.__name__) for look in looks), kinds=("values",))


FIRST = (
    *known(ready_made, kinds=("ready_made",)),
    *known(destroys_group, kinds=("destroyed", "raised", "ended")),
    *known(hides_parameters, frozen_crash, unused_crash, kinds=KINDS),
    *known(frozen_not_broadcast, no_buffers, no_broadcast, wrong_source, reseeds, kinds=("start",)),
)
GRADIENTS = (
    *known(averages_weights, averages_outputs, kinds=("values",)),
    *_at(only_first_step),
    *known(tied_twice, kinds=("values", "traffic")),
    *_at(not_copied_back, no_average, sums, divides_twice, wrong_divisor, mean_of_users),
)
LAST = (
    *known(skips_unused, kinds=("values", "hangs", "ended", "raised")),
    *known(never_waited, divides_before_wait, kinds=("handles",)),
    *known(different_order, kinds=("bits",)),
    *known(gathers_everything, through_one_rank, broadcasts_each_step, sends_frozen, kinds=("traffic",)),
)
MISTAKES = (*FIRST, *GRADIENTS, *LAST)
