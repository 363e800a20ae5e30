"""Mistakes in which gradients share a bucket, each with the sentence that names it."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.known import known
from course_lib.check.specs.overlap_seen import capacity, fill
from course_lib.check.specs.training_seen import Seen


def reduced(seen: Seen, rank: int = 0, step: int = 0) -> list[int]:
    """Bytes of the all-reduces of a step."""
    return [m.nbytes for m in seen.step(rank, step, "all_reduce")]


def one_flat(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    if reduced(seen) == [seen.nbytes]:
        return (
            "All gradients go in one all-reduce. It can start only when the last of them has come, so nothing "
            "overlaps. Cut them into buckets of bucket_mb MiB (2**20 bytes each)."
        )
    return None


def one_per_parameter(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    if len(by_rule(seen)) < len(seen.truth.nbytes) and reduced(seen)[: len(seen.truth.nbytes)] in (
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
    if reduced(seen)[: len(found)] == found:
        return (
            "The buckets are filled from the first layer on. Backward comes from the last layer, so the first bucket "
            "is full at the very end, and all others wait for it. Fill them in reverse order."
        )
    return None


def by_rule(seen: Seen) -> list[int]:
    """Bytes of the buckets, as the exercise wants them."""
    return fill(seen.truth.nbytes.values(), capacity(seen), backwards=True)


def padding(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e, wrong.case)
    sizes, found = fill(seen.truth.nbytes.values(), capacity(seen), backwards=True), reduced(seen)
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
        if [n // 2 for n in reduced(seen)[: len(found)]] == found:
            return (
                "The buckets would be right if an element had 4 bytes. These gradients are float64, with 8: ask each "
                "tensor, tensor.numel() * tensor.element_size()."
            )
        return (
            "Look before you add: when a gradient does not fit into the open bucket, begin a new one. (Only a tensor "
            "that is larger than a bucket by itself may exceed it, alone.)"
        )
    return None


EMPTY = (
    "One bucket has no gradient in it. A gradient that is larger than a bucket does not fit into an empty one either: "
    "begin a new bucket only when there is none, or when the newest one has something in it."
)


def empty_bucket(e: Evidence, wrong: Wrong) -> str | None:
    """The first gradient of all is larger than a bucket, and leaves the first one empty."""
    seen = Seen(e, wrong.case)
    first = [*seen.truth.nbytes.values()][-1]
    text = " ".join(answer.error_text for number, answer in errors(e) if number == wrong.case)
    return EMPTY if first > capacity(seen) and "non-empty" in text else None


def frozen_counted(seen: Seen) -> list[int]:
    """Bytes of the buckets if frozen parameters take room in them, and are not sent."""
    found: list[list[tuple[int, bool]]] = []
    for size, learned in reversed(seen.parameters.values()):
        if found and sum(n for n, _ in found[-1]) + size <= capacity(seen):
            found[-1].append((size, learned))
        else:
            found.append([(size, learned)])
    sent = [sum(size for size, learned in bucket if learned) for bucket in found]
    return [size for size in sent if size]


def _beside(seen: Seen, more: Iterable[int]) -> str:
    more = list(more)
    if len(more) == 1:
        return (
            f"The buckets are right, and beside them {more[0]} bytes travel. One small all-reduce more may be, which "
            f"tells what was used, with 8 bytes for each of the {len(seen.parameters)} parameters at most."
        )
    return (
        f"The buckets are right, and beside them there are {len(more)} more all-reduces in this step. Each costs a "
        "latency: if something must be agreed on, once a step is enough."
    )


def small_buckets(e: Evidence, wrong: Wrong) -> str | None:
    at = re.search(r"step (\d+), rank (\d+):.* buckets are enough", wrong.text)
    if at:
        seen, step, rank = Seen(e, wrong.case), int(at[1]), int(at[2])
        right, found = by_rule(seen), reduced(seen, rank, step)
        if 0 in found:
            return EMPTY
        if not Counter(right) - Counter(found):
            return _beside(seen, (Counter(found) - Counter(right)).elements())
        if found == frozen_counted(seen):
            return (
                "These are the buckets that come of it when frozen parameters take room in them: no gradient of theirs "
                "is sent. Leave out what has requires_grad=False before you fill."
            )
        if found == fill(seen.truth.nbytes.values(), capacity(seen) - 1, backwards=True):
            return (
                f"Here buckets get full to the last byte, {capacity(seen)}, and yours stay smaller. bucket_mb MiB at "
                "most: begin a new one when the sum is larger (> and not >=), and a MiB has 2**20 bytes, not 10**6."
            )
        cuts, between = set(accumulate(found)), set(accumulate(reversed(seen.truth.nbytes.values())))
        if cuts.issuperset(accumulate(right)) and not cuts <= between:
            return "The buckets are right, and each travels in several pieces: send it in one all-reduce."
        return (
            "Fill each bucket as far as the next gradient still fits: bytes, not elements, and a MiB has 2**20 bytes."
        )
    return None


OF_ALL = known(one_flat, forward_order, one_per_parameter, kinds=("overlap", "traffic"))
OF_TRAFFIC = known(padding, over_capacity, small_buckets, kinds=("traffic",))
