"""The usual mistakes in a wrapper with buckets that overlap, each with the sentence that names it."""

from collections.abc import Iterable

from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.data_parallel_mistakes import CRASHES, FIRST, LAST
from course_lib.check.specs.training_gradients import GRADIENTS
from course_lib.check.specs.training_seen import OURS, SYNCHRONIZE, Seen, first_off


def capacity(seen: Seen) -> int:
    """Of a bucket, in bytes."""
    return round(seen.case.options["wrapping"]["bucket_mb"] * 2**20)


def fill(sizes: Iterable[int], most: int, backwards: bool) -> list[int]:
    """Bytes of each bucket, by the rule of the exercise, or the same from the first parameter on."""
    found: list[int] = []
    for size in reversed(list(sizes)) if backwards else sizes:
        if found and found[-1] + size <= most:
            found[-1] += size
        else:
            found.append(size)
    return found


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
    if e.cases[wrong.case].group == "late":
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


def starts_in_synchronize(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    for step in seen.steps:
        if len(seen.phase(0, step, SYNCHRONIZE, "all_reduce")) == len(_reduced(seen, 0, step)):
            return (
                f"All all-reduces of step {step} start in synchronize(), when backward is over. Let each parameter "
                "tell when its gradient has come (register_post_accumulate_grad_hook), and start a bucket as soon as "
                "it is full, in every step."
            )
    return None


def waits_for_all(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "All-reduces start when backward has computed everything: then nothing is left to hide them behind. Start each "
        "bucket when its own last gradient has come."
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
        return (
            "Fill each bucket as far as the next gradient still fits: bytes, not elements, and a MiB has 2**20 bytes."
        )
    return None


MISTAKES = (
    *FIRST,
    *known(waits_in_hook, kinds=("hangs",)),
    *known(leaves_incomplete, kinds=("values", "hangs", "ended", "raised")),
    *CRASHES,
    *known(too_early, kinds=("values",)),
    *GRADIENTS,
    *known(order_differs, kinds=("values", "hangs", "ended", "raised")),
    *LAST,
    *known(one_flat, forward_order, one_per_parameter, kinds=("overlap", "traffic")),
    *known(starts_in_synchronize, waits_for_all, kinds=("overlap",)),
    *known(over_capacity, small_buckets, kinds=("traffic",)),
)
