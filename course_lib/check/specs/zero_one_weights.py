"""Mistakes in ZeRO-1 that show in the weights after a step, each with the sentence that names it."""

from collections.abc import Callable

import torch

from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.zero_one_oracle import Rule, Way, ZeroCase
from course_lib.check.specs.zero_one_seen import Off, first_off, is_close

At = Callable[[Off], str | None]


def _at(*looks: At) -> list:
    """Mistakes that show in the first step whose weights are wrong: until then all was right."""

    def says(look: At) -> Callable[[Evidence, Wrong], str | None]:
        def at_first_off(e: Evidence, wrong: Wrong) -> str | None:
            return look(first_off(e))

        at_first_off.__name__ = look.__name__
        return at_first_off

    return known(*map(says, looks), kinds=("values",))


def own_optimizer(off: Off) -> str | None:
    if not off.seen.answers[0].facts["made"]:
        return "make_optimizer was never called. Which optimizer it is, and with which rate, is the caller's to say."
    return None


def never_steps(off: Off) -> str | None:
    if not any(off.seen.fact("steps", off.step)):
        return "step() ends without a step of the optimizer: call self.optimizer.step() between the two collectives."
    return None


def no_gradient(off: Off) -> str | None:
    if any(off.seen.fact("steps", off.step)) and not any(off.seen.fact("given", off.step)):
        return (
            "The optimizer stepped, but no tensor that it has had a .grad, so it did nothing. The averaged part must "
            "stand in .grad of the very tensor that make_optimizer got."
        )
    return None


def not_written_back(off: Off) -> str | None:
    if off.seen.case.world > 1 and off.each_is(off.seen.case.before(off.step)):
        return (
            "The weights of the model have not changed on any rank: the new ones are in another tensor. torch.cat "
            "makes a copy. After the all-gather, write each piece into its parameter: p.data.copy_(piece.view_as(p))."
        )
    return None


def leaves_rest_out(off: Off) -> str | None:
    case = off.seen.case
    rest = case.numbers % case.world
    places = case.trained.nonzero().flatten()
    want = case.weights[off.step].clone()
    if not rest:
        return None
    want[places[-rest:]] = case.before(off.step)[places[-rest:]]
    if off.each_is(want):
        return (
            f"The last {rest} of {case.numbers} weights never change: {case.numbers} // {case.world} leaves them out. "
            "Round up, and fill with zeros."
        )
    return None


def says_nothing(off: Off) -> str | None:
    if off.seen.case.world > 1 and not off.seen.calls(0, off.step):
        return "The ranks say nothing to each other in step(): each has its own gradients, and its own weights."
    return None


def not_gathered(off: Off) -> str | None:
    case = off.seen.case
    if case.world > 1 and off.each_is(case.weights[off.step], case.before(off.step)):
        return (
            "Each rank has the new values of its own part, and the old ones of all other parts. An all-gather must "
            "bring all parts to all ranks, and from there into all parameters."
        )
    return None


def sums(off: Off) -> str | None:
    world = off.seen.case.world
    if off.all_are(Way(factor=world)):
        return (
            f"The optimizer got the sum of the gradients of {world} ranks. Divide by the world size: each rank's loss "
            "is a mean over its own samples. (Adam hardly notices, since it divides by the gradient's own size; with "
            "weight decay, clipping or SGD it is another training.)"
        )
    return None


def divides_twice(off: Off) -> str | None:
    if off.all_are(Way(factor=1 / off.seen.case.world)):
        return f"The gradients are {off.seen.case.world} times too small: divide by the world size once."
    return None


def own_gradients(off: Off) -> str | None:
    case = off.seen.case
    alone = [case.by(Way(only=rank))[off.step] for rank in off.seen.ranks]
    if case.world > 1 and off.each_is(*alone):
        return (
            "Each part was updated by the gradient of one rank alone, so the samples of the others count for nothing. "
            "The reduce-scatter is missing, or its result is not what stands in .grad of the part."
        )
    return None


def accumulates(off: Off) -> str | None:
    if off.step and off.all_are(Way(accumulates=True)):
        return (
            "The first step is right; then the gradient of the step before is still there, and backward adds to it. "
            "zero_grad() must clear the .grad of the model's parameters. That of the part is not enough."
        )
    return None


def forgets_state(off: Off) -> str | None:
    made = off.seen.answers[0].facts["made"]
    if off.step and (off.all_are(Way(forgets=True)) or made > off.seen.case.parameters):
        return (
            f"The first step is right, and then the optimizer has forgotten what it kept ({made} optimizers were made "
            "on rank 0). Call make_optimizer once, in __init__, with a part that stays the same tensor: the state "
            "belongs to that tensor."
        )
    return None


def frozen_moves(off: Off) -> str | None:
    if off.all_are(Way(frozen=True)):
        return (
            "Frozen parameters moved. They got gradient zero, but weight decay pulls at every weight that an optimizer "
            "has. Leave out what has requires_grad=False."
        )
    return None


def wrong_place(off: Off) -> str | None:
    """A part with padding in a wrong place brings its zeros along."""
    case, step = off.seen.case, off.step
    right = torch.cat([case.weights[step][case.trained], torch.zeros(1, dtype=torch.float64)])

    def all_known(rank: int) -> bool:
        return bool(is_close(off.seen.got(rank, step)[case.trained].unsqueeze(1), right).any(1).all())

    if all(map(all_known, off.seen.ranks)):
        return (
            "All numbers are right, but they stand in the wrong places. Rank r must own the r-th part (reduce-scatter "
            "gives it that one, and all-gather puts it there), and parameters are cut off in the order in which they "
            "were joined."
        )
    return None


def other_part(off: Off) -> str | None:
    """In the first step: the gradient of a rank's part has moved the weights of another part."""
    case, world = off.seen.case, off.seen.case.world
    length = -(-case.numbers // world)
    old, new, gradient = (_parts(values[case.trained], length, world) for values in (
        case.start, off.seen.got(0, 0), case.gradient()
    ))  # fmt: skip
    used = [
        next((k for k in off.seen.ranks if _moved(case, old[k], gradient[r], new[r])), None) for r in off.seen.ranks
    ]
    r = next((r for r, k in enumerate(used) if k != r), None)
    if off.step or world == 1 or r is None or used[r] is None:
        return None
    return (
        f"What the reduce-scatter gives to rank {r} is the gradient of part {r}, and rank {r} updates part {used[r]} "
        "by it. Rank r must own the r-th part: that number is dist.get_rank()."
    )


def _parts(values: torch.Tensor, length: int, world: int) -> list[torch.Tensor]:
    padding = values.new_zeros(length * world - len(values))
    return list(torch.cat([values, padding]).split(length))


def _moved(case: ZeroCase, old: torch.Tensor, gradient: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether the first update makes `new` of `old`; at the end `new` may have lost its padding."""
    same = is_close(new, old + Rule(case.options["optimizer"]).change(old, gradient))
    return bool(same[new != 0].all()) and bool((new != 0).any())


def loses_digits(off: Off) -> str | None:
    want = off.seen.case.weights[off.step]
    if all((off.seen.got(rank, off.step) - want).abs().max() <= 1e-3 * want.abs().max() for rank in off.seen.ranks):
        return (
            "Nearly right: on their way numbers go through a dtype with fewer digits. Keep that of the parameters, "
            "which is float64 here: torch.zeros_like(p), p.new_zeros(n), dtype=p.dtype."
        )
    return None


WEIGHTS = (
    *_at(own_optimizer, never_steps, no_gradient, not_written_back, leaves_rest_out, says_nothing, not_gathered),
    *_at(sums, divides_twice, own_gradients, accumulates, forgets_state, frozen_moves, wrong_place, other_part),
    *_at(loses_digits),
)
