"""The usual mistakes in a wrapper with buckets that overlap, each with the sentence that names it."""

from itertools import accumulate

from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.data_parallel_mistakes import CRASHES, FIRST, LAST
from course_lib.check.specs.overlap_seen import begun_late, buckets, capacity, fill
from course_lib.check.specs.training_gradients import GRADIENTS
from course_lib.check.specs.training_handles import ASKS
from course_lib.check.specs.training_seen import OURS, SYNCHRONIZE, Seen, first_off


def _reduced(seen: Seen, rank: int = 0, step: int = 0) -> list[int]:
    return [m.nbytes for m in seen.step(rank, step, "all_reduce")]


def too_early(e: Evidence, wrong: Wrong) -> str | None:
    """More bytes have been sent off than backward had made."""
    off = first_off(e)
    if off is None:
        return None
    seen, step = off.seen, off.step
    for rank in seen.ranks:
        sent, ready = 0, seen.ready(rank, step)
        for m in seen.step(rank, step, "all_reduce"):
            sent += m.nbytes
            made = sum(seen.truth.nbytes[name] for name, when in ready if when <= m.start)
            if m.start < ready[-1][1] and sent > made:
                return (
                    f"On rank {rank} an all-reduce started ({m.where}) when {made} bytes of gradients were there and "
                    f"{sent} were sent: its bucket was not full. Count the gradients of each bucket, and start when "
                    "the last one has come."
                )
    return None


def leaves_incomplete(e: Evidence, wrong: Wrong) -> str | None:
    """A bucket with an unused parameter never gets full."""
    seen = Seen(e, wrong.case)
    if seen.case.group != "branch" or not (_fails_on_missing(e, wrong) or _left_out(seen, wrong)):
        return None
    return (
        "A parameter that a rank does not use in a step never calls its hook, so its bucket never gets full there. "
        "synchronize() must start what has not started, with zeros where there is no gradient, and in the same order "
        "on all ranks."
    )


def _fails_on_missing(e: Evidence, wrong: Wrong) -> bool:
    found = [answer for number, answer in errors(e) if number == wrong.case]
    kinds = ("IndexError", "KeyError", "AssertionError", "ValueError")
    return any(answer.error in kinds or "'wait'" in answer.error_text for answer in found)


def _left_out(seen: Seen, wrong: Wrong) -> bool:
    """Some rank has ended a step with fewer all-reduces than others, or all have left some out."""
    if wrong.kind == "values":
        step = first_off(seen.e).step
        return sum(_reduced(seen, 0, step)) < seen.nbytes
    last = {m.rank: m for m in seen.e.messages.get(seen.number, ())}
    at_fence = [m.op == "barrier" and m.where.startswith(OURS) for m in last.values()]
    return any(at_fence) and not all(at_fence)


def order_differs(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    sizes = [[m.nbytes for m in seen.calls(rank, "all_reduce")] for rank in seen.ranks]
    for rank in seen.ranks[1:]:
        for k, (a, b) in enumerate(zip(sizes[0], sizes[rank], strict=False)):
            if a != b and {a, b} <= set(fill(seen.truth.nbytes.values(), capacity(seen), backwards=True)):
                return (
                    f"Ranks start buckets in different orders: all-reduce number {k + 1} of the case has {a} bytes on "
                    f"rank 0 and {b} on rank {rank}. What meets is added. (Where ranks use different branches, buckets "
                    "get full in different orders.) Start bucket k + 1 never before bucket k, even when it is full "
                    "first."
                )
    return None


def waits_in_hook(e: Evidence, wrong: Wrong) -> str | None:
    asks = any(ASKS in answer.error_text for _, answer in errors(e))
    if asks or (wrong.kind == "hangs" and e.cases[wrong.case].group == "late"):
        return (
            "A hook runs inside backward: while it waits, backward does not go on, so nothing overlaps. Start the "
            "all-reduce with async_op=True, keep the handle, and wait in synchronize()."
        )
    return None


def one_flat(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    if _reduced(seen) == [seen.nbytes]:
        return (
            "All gradients go in one all-reduce. It can start only when the last of them has come, so nothing "
            "overlaps. Cut them into buckets of bucket_mb MiB (2**20 bytes each)."
        )
    return None


def one_per_parameter(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    if _reduced(seen)[: len(seen.truth.nbytes)] in (
        list(seen.truth.nbytes.values()), list(reversed(seen.truth.nbytes.values())),
    ):  # fmt: skip
        return (
            "Every gradient has an all-reduce of its own, and each costs a latency, however small it is. Let several "
            "share a flat tensor of up to bucket_mb MiB, and reduce that."
        )
    return None


def forward_order(e: Evidence, wrong: Wrong) -> str | None:
    """The buckets are those that come of filling from the first parameter on."""
    seen = Seen(e, wrong.case)
    found = fill(seen.truth.nbytes.values(), capacity(seen), backwards=False)
    if _reduced(seen)[: len(found)] == found:
        return (
            "The buckets are filled from the first layer on. Backward comes from the last layer, so the first bucket "
            "is full at the very end, and all others wait for it. Fill them in reverse order."
        )
    return None


def _late_step(e: Evidence, wrong: Wrong) -> tuple[Seen, int, int]:
    """The case, the rank and the step of the first bucket that began too late."""
    seen = Seen(e, wrong.case)
    for rank in seen.ranks:
        for step in seen.steps:
            if begun_late(buckets(seen, rank, step) or []):
                return seen, rank, step
    return seen, 0, 0


def not_begun_anew(e: Evidence, wrong: Wrong) -> str | None:
    """In time in each step, until one in which this rank had no gradient for some parameters."""
    seen, rank, step = _late_step(e, wrong)
    back = [name for name in seen.used(rank, step) if step and name not in seen.used(rank, step - 1)]
    if not back:
        return None
    return (
        f"In each step before, rank {rank} began its buckets in time. In step {step - 1} it did not use "
        f"{' and '.join(back)}, so a bucket did not get full. In step {step} it does, and the bucket waits all the "
        "same: something of the step before is left over, a count or a flag. In synchronize(), set all of it to where "
        "it began, whatever has become of it; do not add to it."
    )


def starts_in_synchronize(e: Evidence, wrong: Wrong) -> str | None:
    seen, rank, step = _late_step(e, wrong)
    if len(seen.phase(rank, step, SYNCHRONIZE, "all_reduce")) < len(_reduced(seen, rank, step)):
        return None
    return (
        f"All all-reduces of step {step} start in synchronize(), when backward is over. Let each parameter tell when "
        "its gradient has come (register_post_accumulate_grad_hook), and start a bucket as soon as it is full, in "
        "every step."
    )


def waits_for_all(e: Evidence, wrong: Wrong) -> str | None:
    seen, rank, step = _late_step(e, wrong)
    last = max((when for _, when in seen.ready(rank, step)), default=0.0)
    if any(m.start < last for m in seen.step(rank, step, "all_reduce")):
        return None
    return (
        "All-reduces start when backward has computed everything: then nothing is left to hide them behind. Start each "
        "bucket when its own last gradient has come."
    )


def late_buckets(e: Evidence, wrong: Wrong) -> str | None:
    seen, rank, step = _late_step(e, wrong)
    found = buckets(seen, rank, step) or []
    late = begun_late(found)
    if not late:
        return None
    by_one = all(b.begun == found[b.number + 1].due for b in late if b.number + 2 < len(found))
    why = "Each waits until the next one is full, too. " if by_one and len(late) > 1 else ""
    return (
        f"{why}Start a bucket in the hook of its own last gradient: look there, and in a loop, whether the next bucket "
        "in the order is full."
    )


def padding(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    sizes, found = fill(seen.truth.nbytes.values(), capacity(seen), backwards=True), _reduced(seen)
    if len(found) < len(sizes) or any(a < b for a, b in zip(found, sizes, strict=False)) or found[0] == sizes[0]:
        return None
    return (
        f"More is sent than there is: the gradients of the first bucket have {sizes[0]} bytes, and {found[0]} travel. "
        "Send a flat tensor of the gradients, without padding."
    )


def over_capacity(e: Evidence, wrong: Wrong) -> str | None:
    if "a bucket holds" in wrong.text:
        seen = Seen(e, wrong.case)
        found = fill((n // 2 for n in seen.truth.nbytes.values()), capacity(seen), backwards=True)
        if [n // 2 for n in _reduced(seen)[: len(found)]] == found:
            return (
                "The buckets would be right if an element had 4 bytes. These gradients are float64, with 8: ask each "
                "tensor, tensor.numel() * tensor.element_size()."
            )
        return (
            "Look before you add: when a gradient does not fit into the open bucket, begin a new one. (Only a tensor "
            "that is larger than a bucket by itself may exceed it, alone.)"
        )
    return None


def small_buckets(e: Evidence, wrong: Wrong) -> str | None:
    if "buckets are enough" in wrong.text:
        seen = Seen(e, wrong.case)
        right, found = fill(seen.truth.nbytes.values(), capacity(seen), backwards=True), _reduced(seen)
        if len(found) > len(right) + 1 and not [n for n in right if n not in found]:
            return (
                f"The {len(right)} buckets are right, and beside them there are {len(found) - len(right)} more "
                "all-reduces in this step. Each costs a latency: if something must be agreed on, once a step is enough."
            )
        cuts, between = set(accumulate(found)), set(accumulate(reversed(seen.truth.nbytes.values())))
        if cuts.issuperset(accumulate(right)) and not cuts <= between:
            return "The buckets are right, and each travels in several pieces: send it in one all-reduce."
        return (
            "Fill each bucket as far as the next gradient still fits: bytes, not elements, and a MiB has 2**20 bytes."
        )
    return None


MISTAKES = (
    *FIRST,
    *known(waits_in_hook, kinds=("hangs", "raised")),
    *known(leaves_incomplete, kinds=("values", "hangs", "ended", "raised")),
    *CRASHES,
    *known(too_early, kinds=("values",)),
    *GRADIENTS,
    *known(order_differs, kinds=("values", "hangs", "ended", "raised")),
    *LAST,
    *known(one_flat, forward_order, one_per_parameter, kinds=("overlap", "traffic")),
    *known(not_begun_anew, starts_in_synchronize, waits_for_all, late_buckets, kinds=("overlap",)),
    *known(padding, over_capacity, small_buckets, kinds=("traffic",)),
)
