"""The usual mistakes in a wrapper with buckets that overlap, each with the sentence that names it."""

from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.data_parallel_mistakes import CRASHES, FIRST, LAST
from course_lib.check.specs.overlap_buckets import OF_ALL, OF_TRAFFIC, by_rule, empty_bucket, reduced
from course_lib.check.specs.overlap_seen import begun_late, buckets, capacity, fill
from course_lib.check.specs.training_gradients import GRADIENTS
from course_lib.check.specs.training_handles import ASKS
from course_lib.check.specs.training_seen import OURS, SYNCHRONIZE, Seen, first_off
from course_lib.launch import Message


def _too_early(seen: Seen, step: int) -> tuple[Message, int, int] | None:
    """An all-reduce with which more bytes had been sent off than backward had made, and these two numbers."""
    for rank in seen.ranks:
        sent, ready = 0, seen.ready(rank, step)
        for m in seen.step(rank, step, "all_reduce"):
            sent += m.nbytes
            made = sum(seen.truth.nbytes[name] for name, when in ready if when <= m.start)
            if m.start < ready[-1][1] and sent > made:
                return m, sent, made
    return None


def too_early(e: Evidence, wrong: Wrong) -> str | None:
    """More bytes have been sent off than backward had made."""
    off = first_off(e)
    found = off and _too_early(off.seen, off.step)
    if not found:
        return None
    m, sent, made = found
    text = (
        f"On rank {m.rank} an all-reduce started ({m.where}) when {made} bytes of gradients were there and {sent} were "
        "sent: its bucket was not full. "
    )
    if off.step == 0 or any(_too_early(off.seen, step) for step in range(off.step)):
        return f"{text}Count the gradients of each bucket, and start when the last one has come."
    return (
        f"{text}Up to step {off.step - 1} none started too early. Does something of a step stay for the next one, a "
        "count or a flag? In synchronize(), set all of it to where it began. And start a bucket only when its own "
        "last gradient has come."
    )


def left_over(e: Evidence, wrong: Wrong) -> str | None:
    """Right in the steps before, in which the same parameters were used."""
    off = first_off(e)
    if off is None or off.step == 0 or off.kind != "grad":
        return None
    seen, step = off.seen, off.step
    if any(seen.used(rank, step) != seen.used(rank, before) for rank in seen.ranks for before in range(step)):
        return None
    begun = f"Up to step {step - 1} all gradients are right, and step {step} uses the same parameters. "
    anew = (
        "In synchronize(), set counts and flags to where they began, and empty the lists of flat tensors and handles."
    )
    silent = not any(reduced(seen, rank, step) for rank in seen.ranks)
    if silent and reduced(seen, 0, step - 1) and not seen.grads_are(step, seen.local(step)):
        return f"{begun}But in step {step} no all-reduce is made: something of the step before is left over. {anew}"
    if early := _too_early(seen, step):
        m, sent, made = early
        return (
            f"{begun}But in step {step} an all-reduce of rank {m.rank} started ({m.where}) when {made} bytes of "
            f"gradients were there and {sent} were sent: something of the step before is left over. {anew}"
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
        return sum(reduced(seen, 0, step)) < seen.nbytes
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
    if asks or "begins its backward only when the others have ended theirs" in wrong.text:
        return (
            "A hook runs inside backward: while it waits, backward does not go on, so nothing overlaps. Start the "
            "all-reduce with async_op=True, keep the handle, and wait in synchronize()."
        )
    return None


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _late_step(e: Evidence, wrong: Wrong) -> tuple[Seen, int, int]:
    """The case, the rank and the step of the first bucket that began too late."""
    seen = Seen(e, wrong.case)
    for rank in seen.ranks:
        for step in seen.steps:
            if begun_late(buckets(seen, rank, step) or []):
                return seen, rank, step
    return seen, 0, 0


def not_begun_anew(e: Evidence, wrong: Wrong) -> str | None:
    """Right or in time in each step, until one that finds what another one has left."""
    if wrong.kind == "values":
        return left_over(e, wrong)
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
    if len(seen.phase(rank, step, SYNCHRONIZE, "all_reduce")) < len(reduced(seen, rank, step)):
        return None
    text = f"All all-reduces of step {step} start in synchronize(), when backward is over"
    before = [buckets(seen, rank, earlier) for earlier in range(step)]
    if before and all(before) and not any(map(begun_late, before)):
        return (
            f"{text}. Up to step {step - 1} buckets began in time. Does something of a step stay for the next one, a "
            "count or a flag? In synchronize(), set all of it to where it began."
        )
    if seen.answers[rank].facts["hooked"][step]:
        return (
            f"{text}, although parameters have hooks: none of them started a bucket. Does each count for the bucket of "
            "its own parameter? A lambda that is made in a loop looks up the loop's variable when it is "
            "called, and finds its last value. Give it the value now: lambda _, number=number: self.arrived(number)."
        )
    return (
        f"{text}. Let each parameter tell when its gradient has come (register_post_accumulate_grad_hook), and start a "
        "bucket as soon as it is full, in every step."
    )


def waits_for_all(e: Evidence, wrong: Wrong) -> str | None:
    seen, rank, step = _late_step(e, wrong)
    last = max((when for _, when in seen.ready(rank, step)), default=0.0)
    if any(m.start < last for m in seen.step(rank, step, "all_reduce")):
        return None
    if buckets(seen, rank, step) is None:
        return (
            f"No all-reduce began before that, and the buckets are others than those of the rule: of "
            f"{_list(reduced(seen, rank, step))} bytes, not {_list(by_rule(seen))}. Which gradients share one "
            "decides when it gets full. From the last parameter to the first, only the newest bucket takes more; when "
            "a gradient does not fit into it, begin a new one, and go back to none."
        )
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


MISTAKES = (
    *FIRST,
    *known(waits_in_hook, kinds=("hangs", "raised")),
    *known(leaves_incomplete, kinds=("values", "hangs", "ended", "raised")),
    *CRASHES,
    *known(empty_bucket, kinds=("raised",)),
    *known(not_begun_anew, too_early, kinds=("values",)),
    *GRADIENTS,
    *known(order_differs, kinds=("values", "hangs", "ended", "raised")),
    *LAST,
    *OF_ALL,
    *known(not_begun_anew, starts_in_synchronize, waits_for_all, late_buckets, kinds=("overlap",)),
    *OF_TRAFFIC,
)
