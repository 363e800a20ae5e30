"""The usual mistakes in ZeRO-1 by hand, each with the sentence that names it."""

from course_lib.check import known as known_mistakes
from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.data_parallel_mistakes import frozen_crash, none_error
from course_lib.check.specs.zero_one_seen import GATHERS, NUMBER, SCATTERS, Seen, close, first_off
from course_lib.check.specs.zero_one_weights import WEIGHTS


def ready_made(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "That is finished already. Write it yourself, from reduce_scatter_single, all_gather_single and the optimizer."
    )


def destroys_group(e: Evidence, wrong: Wrong) -> str | None:
    gone = _said(e, "Default process group has not been initialized")
    return known_mistakes.destroys_group(e, wrong) if gone or wrong.kind == "destroyed" else None


# What is raised.


def _said(e: Evidence, *parts: str) -> bool:
    return any(part in answer.error_text for _, answer in errors(e) for part in parts)


def generator_used_up(e: Evidence, wrong: Wrong) -> str | None:
    off = first_off(e) if wrong.kind == "values" else None
    nothing = off and off.each_is(off.seen.case.before(off.step)) and 0 < off.seen.sent(0, off.step) < off.seen.fair / 2
    if nothing or _said(e, "empty parameter list", "expected a non-empty list of Tensors"):
        return (
            "There are no parameters left. `params` may be a generator, as model.parameters() is: it can be gone "
            "through once, so make a list of it first. (Or were those taken that have a .grad? Before the first "
            "backward none has one.)"
        )
    return None


def _unequal(e: Evidence, numbers: int) -> bool:
    """So many numbers did not fit, or parts did not fit each other."""
    tells = _said(e, "outputShape[0] * worldSize", "is invalid for input of size", "must match the size of tensor")
    return (tells and _said(e, str(numbers))) or _said(e, "invalid tensor size at index")


def no_padding(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    missing = -case.numbers % case.world
    if case.group in ("plain", "tied") and missing and _unequal(e, case.numbers):
        return (
            f"{case.numbers} weights cannot be cut into {case.world} equal parts, and both collectives need equal "
            f"ones. Append {missing} zero{'s' * (missing > 1)} before you cut, and leave them out when you write back."
        )
    return None


def leaf_in_place(e: Evidence, wrong: Wrong) -> str | None:
    if _said(e, "a leaf Variable that requires grad"):
        return (
            "Autograd does not let a parameter be overwritten. Write into p.data, or do it under torch.no_grad(): "
            "no gradient is wanted of this copy."
        )
    return None


def parameter_is_sent(e: Evidence, wrong: Wrong) -> str | None:
    if _said(e, "created in no_grad mode and is being modified inplace"):
        return (
            "What goes into the collective requires a gradient (it is a Parameter), so autograd watches the result. "
            "Send part.detach(), which is the same memory, or make the part a plain tensor: optimizers take that, too."
        )
    return None


def unused_crash(e: Evidence, wrong: Wrong) -> str | None:
    if none_error(e, wrong, "branch"):
        return (
            "A parameter that this rank did not use in this step has .grad None. Other ranks may have used it, and its "
            "place in the flat tensor must stay: put zeros there."
        )
    return None


def skips_unused(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    if case.group != "branch":
        return None
    if wrong.kind == "values":
        seen = Seen(e, wrong.case)
        fits = all(close(seen.got(rank, 0), case.closed_up()) for rank in seen.ranks)
    else:
        fits = _said(e, "outputShape[0] * worldSize", "invalid tensor size", "size of tensor") or _differ(e, wrong.case)
    if fits:
        return (
            "In this case some parameters have no gradient on some ranks (.grad is None). Whoever leaves them out "
            "makes a shorter tensor, and all that comes behind stands in another place. Put zeros there instead."
        )
    return None


def _differ(e: Evidence, number: int) -> bool:
    """Some call is not equally large on all ranks."""
    ranks = range(e.cases[number].world)
    put = [[m.nbytes for m in e.messages.get(number, ()) if m.rank == rank] for rank in ranks]
    return any(len(set(of_call)) > 1 for of_call in zip(*put, strict=False))


# What is kept, what is sent, bits, handles.


def state_not_cut(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    whole = seen.case.kept * seen.case.numbers
    if all(answer.facts["state"] >= whole for answer in seen.answers):
        return (
            "The weights are right, and every rank keeps the whole state, as DDP does. To keep an N-th, the optimizer "
            "must know only this rank's part: make_optimizer([part])."
        )
    return None


def one_rank_has_all(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    kept = [answer.facts["state"] for answer in seen.answers]
    if max(kept) == sum(kept):
        return (
            f"Rank {kept.index(max(kept))} keeps everything, and the others keep nothing: it does all the work, and "
            "needs as much memory as before. Cut the weights into equal parts, one for each rank."
        )
    return None


def whole_parameters(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    kept = [answer.facts["state"] for answer in seen.answers]
    if sum(kept) <= seen.case.kept * (seen.case.numbers + seen.case.world * seen.case.parameters):
        return (
            f"The ranks keep {', '.join(map(str, kept))} numbers: whole parameters are dealt out, and they are not "
            "equally large. Memory is as scarce as on the fullest rank. Join all of them into one flat tensor, and cut "
            "that: a cut may go through a parameter."
        )
    return None


def all_reduce_instead(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    found = [m for m in seen.calls(0, 0) if m.op.startswith("all_reduce")]
    if sum(m.nbytes for m in found) >= NUMBER * seen.case.numbers:
        return (
            f"The gradients are all-reduced ({found[0].where}), and then each rank uses its own part of them only. An "
            "all-reduce is a reduce-scatter *and* an all-gather: its second half is sent for nothing. reduce_scatter_"
            "single gives each rank its part."
        )
    return None


def gathers_gradients(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    calls = seen.calls(0, 0)
    whole = [m for m in calls if m.op in GATHERS and m.nbytes >= NUMBER * seen.case.numbers]
    if whole and not any(m.op in SCATTERS for m in calls):
        return (
            f"{whole[0].op} brings the whole gradients of all ranks to every rank ({whole[0].where}), to be added "
            "there. A reduce-scatter adds on the way, and each rank receives its part only."
        )
    return None


def gathers_whole(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    whole = [m for m in seen.calls(0, 0) if m.op in GATHERS and m.nbytes >= NUMBER * seen.case.numbers]
    if whole:
        return (
            f"Each rank puts all weights into the {whole[0].op} ({whole[0].where}), of which only its own part is new. "
            "Put in the part: all-gather joins the parts."
        )
    return None


def different_bits(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "A rank that computes a new weight itself may round in another way than the others do: a sum in another order "
        "is enough. Then the models drift apart. One rank owns a weight and computes it; the others take its number."
    )


def never_waited(e: Evidence, wrong: Wrong) -> str | None:
    return "Keep the handle that async_op=True returns, and call its wait() before you use the result."


MISTAKES = (
    *known(ready_made, kinds=("ready_made",)),
    *known(destroys_group, kinds=("destroyed", "raised", "ended")),
    *known(generator_used_up, kinds=("raised", "ended", "values")),
    *known(no_padding, leaf_in_place, parameter_is_sent, frozen_crash, unused_crash, kinds=("raised",)),
    *known(skips_unused, kinds=("raised", "hangs", "ended", "values")),
    *WEIGHTS,
    *known(state_not_cut, one_rank_has_all, whole_parameters, kinds=("state",)),
    *known(all_reduce_instead, gathers_gradients, gathers_whole, kinds=("traffic",)),
    *known(different_bits, kinds=("bits",)),
    *known(never_waited, kinds=("handles",)),
)
