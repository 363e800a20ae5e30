"""Mistakes that show in the gradients after `synchronize`, each with the sentence that names it."""

from collections.abc import Callable

import torch

from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.training_models import TIED
from course_lib.check.specs.training_seen import FORWARD, Seen, close, complete, first_off

In = Callable[[Seen, int], str | None]


def at_first_off(looks_like: In, name: str) -> Callable[[Evidence, Wrong], str | None]:
    """A mistake that shows in the step in which a gradient is wrong first: until then weights are right."""

    def says(e: Evidence, wrong: Wrong) -> str | None:
        off = first_off(e)
        return looks_like(off.seen, off.step) if off and off.kind == "grad" else None

    says.__name__ = name
    return says


def sums_weights(seen: Seen, step: int) -> str | None:
    """They were their sum over the ranks when `synchronize` returned."""
    for name in seen.truth.grad if seen.case.world > 1 else ():
        total = sum(seen.before(rank, name, step) for rank in seen.ranks)
        if total.any() and all(close(seen.value("held", rank, name, step), total) for rank in seen.ranks):
            return (
                f"The weights are summed, the gradients are not: in step {step}, before the optimizer's step, {name} "
                f"became the sum over the {seen.case.world} ranks. p and p.data are the parameter; all-reduce its "
                "gradient, p.grad, and divide by the world size."
            )
    return None


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
    if sent and [m.nbytes for m in sent] == list(off.seen.truth.nbytes.values()):
        return (
            f"Gradients are averaged in forward ({sent[0].where}). There are none yet, or those of the step before: "
            "backward makes them. The loop calls synchronize() after it; forward must not."
        )
    if sent:
        return (
            f"Forward calls all_reduce ({sent[0].where}): the outputs or the loss are averaged. Backward knows nothing "
            "of that: every rank still computes the gradient of its own batch. Average the gradients, after backward."
        )
    return None


def only_some_steps(seen: Seen, step: int) -> str | None:
    right = step > 0 and seen.case.group != "branch"
    if right and seen.grads_are(step, seen.local(step)):
        return (
            f"All is right up to step {step - 1}; in step {step} each rank keeps its own gradients. Average them in "
            "every step: what is done once, counted once, or done every other time must begin again in each."
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


def reduces_weights(seen: Seen, step: int) -> str | None:
    if seen.case.world > 1 and seen.grads_are(step, seen.local(step)) and not seen.weights_stay(step):
        return (
            f".grad still holds what each rank computed itself, and in step {step} the weights have changed before the "
            "optimizer's step. p and p.data are the parameter: all-reduce its gradient, p.grad."
        )
    return None


def weights_for_gradients(seen: Seen, step: int) -> str | None:
    """What is wrong is the weight itself, or a sum of the ranks' weights."""
    for factor in (1.0, seen.case.world, 1 / seen.case.world):

        def weight(rank: int, name: str, factor: float = factor) -> torch.Tensor:
            return seen.before(rank, name, step) * factor

        off = [name for name in seen.truth.grad if not seen.grads_are(step, seen.mean(step), [name])]
        if off and seen.weights_stay(step) and seen.grads_are(step, weight, off):
            times = {1.0: "", seen.case.world: f"{seen.case.world} times "}.get(factor, f"1/{seen.case.world} of ")
            return (
                f"In step {step} the gradient of {off[0]} after synchronize() is {times}the weight itself: the "
                "parameter travelled, not its gradient. p and p.data are the parameter, and so is what a hook of "
                "register_post_accumulate_grad_hook gets: take its .grad."
            )
    return None


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


def divides_only_the_last(seen: Seen, step: int) -> str | None:
    """The division stands behind the loop, where the loop's variable is the last parameter."""
    *others, last = seen.truth.grad
    world = seen.case.world
    summed = others and seen.grads_are(step, seen.mean(step, world), others)
    if world == 1 or not summed or not seen.grads_are(step, seen.mean(step), [last]):
        return None
    return (
        f"The gradient of {last}, the last parameter, is the mean over the ranks, all others are sums. Does the "
        "division stand behind the loop? It belongs into it, after each all-reduce."
    )


def divides_twice(seen: Seen, step: int) -> str | None:
    if seen.grads_are(step, seen.mean(step, 1 / seen.case.world)):
        return f"The gradients are {seen.case.world} times too small: divide by the world size once, before or after."
    return None


def wrong_divisor(seen: Seen, step: int) -> str | None:
    """All gradients are the mean, times the same factor."""
    found = {name: seen.value("grad", 0, name, step) for name in seen.truth.grad}
    both = [(g.flatten(), seen.truth.grad[name][step].flatten()) for name, g in found.items() if g is not None]
    factor = float(sum(g @ want for g, want in both) / sum(want @ want for _, want in both)) if both else 0.0
    if not factor or not seen.grads_are(step, seen.mean(step, factor)):
        return None
    divisor, world = seen.case.world / factor, seen.case.world
    told = "" if round(divisor, 6) != 2 else " That is right with two ranks only."
    return (
        f"The sum over {world} ranks was divided by {divisor:.6g}.{told} Divide by dist.get_world_size(), which is "
        f"{world} here: each rank's loss is already the mean over its own samples."
    )


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


def only_one_rank(seen: Seen, step: int) -> str | None:
    first = {name: seen.value("grad", 0, name, step) for name in seen.truth.grad}
    right = all(g is not None and close(g, seen.truth.grad[name][step]) for name, g in first.items())
    if right and any(m.op in ("reduce", "gather") for m in seen.step(0, step)):
        return (
            "Rank 0 has the mean, the others do not: reduce and gather give it to one rank, all_reduce gives it to all."
        )
    return None


def copies_rank_0(seen: Seen, step: int) -> str | None:
    if seen.case.world > 1 and seen.grads_are(step, lambda rank, name: seen.truth.local[0][name][step]):
        return (
            "All ranks have the gradient of rank 0: broadcast copies it, and the samples of the others count for "
            "nothing. Take the mean: all_reduce, then divide."
        )
    return None


def leaves_some_out(seen: Seen, step: int) -> str | None:
    if seen.case.world == 1 or seen.case.group == "branch":
        return None
    names = list(seen.truth.grad)
    left = [name for name in names if not seen.grads_are(step, seen.mean(step), [name])]
    if len(left) < len(names) and seen.grads_are(step, seen.local(step), left):
        return (
            f"{', '.join(left)}: each rank still has the gradient of its own batch. The other gradients are right. Go "
            "through all parameters that have requires_grad=True."
        )
    return None


def loses_digits(seen: Seen, step: int) -> str | None:
    def near(rank: int, name: str) -> bool:
        got, want = seen.value("grad", rank, name, step), seen.truth.grad[name][step]
        return got is not None and bool(((got - want).abs() <= 0.01 * want.abs().max()).all())

    if all(near(rank, name) for rank in seen.ranks for name in seen.truth.grad):
        return (
            "Nearly right: on their way the gradients go through a dtype with fewer digits (float32, float16, "
            "bfloat16). Keep the dtype of the gradient, which is float64 here: torch.zeros_like(p), no .float()."
        )
    return None


def _at(*looks: In) -> list:
    return known(*(at_first_off(look, look.__name__) for look in looks), kinds=("values",))


GRADIENTS = (
    *_at(sums_weights),
    *known(averages_weights, averages_outputs, kinds=("values",)),
    *_at(only_some_steps),
    *known(tied_twice, kinds=("values", "traffic")),
    *_at(
        weights_for_gradients,
        reduces_weights,
        not_copied_back,
        no_average,
        sums,
        divides_only_the_last,
        divides_twice,
        wrong_divisor,
        mean_of_users,
    ),
    *_at(only_one_rank, copies_rank_0, leaves_some_out, loses_digits),
)
