"""When the buckets of exercise 06 began, beside when they could have begun."""

from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.check.specs.training_seen import SYNCHRONIZE, Seen
from course_lib.launch import Message


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


@dataclass(frozen=True)
class Bucket:
    """One bucket of one rank in one step. Times are counted in gradients that have come in this backward."""

    number: int
    call: Message
    due: int  # it and those in front of it were full with this gradient, counted from 1; the last of all has one more
    begun: int  # its all-reduce began when so many had come; one more than there are: in synchronize()


def buckets(seen: Seen, rank: int, step: int) -> list[Bucket] | None:
    """All buckets, or those in front of the first that did not get full; None if they are not those of the rule."""
    sizes = fill(seen.truth.nbytes.values(), capacity(seen), backwards=True)
    calls = _in_order(seen.step(rank, step, "all_reduce"), sizes)
    if calls is None:
        return None
    came = [name for name, _ in seen.ready(rank, step)]
    found, full, left = [], 0, list(reversed(seen.truth.nbytes.items()))
    for number, (call, size) in enumerate(zip(calls, sizes, strict=True)):
        while size:
            name, nbytes = left.pop(0)
            if name not in came:
                return found
            full, size = max(full, came.index(name) + 1), size - nbytes
        due = full + (number == len(sizes) - 1)
        found.append(Bucket(number, call, due, _begun(seen, rank, step, call)))
    return found


def _in_order(calls: list[Message], sizes: list[int]) -> list[Message] | None:
    """The calls with these sizes; others may stand between them."""
    left = iter(calls)
    found = [next((m for m in left if m.nbytes == size), None) for size in sizes]
    return None if None in found else found


def _begun(seen: Seen, rank: int, step: int, call: Message) -> int:
    ready = seen.ready(rank, step)
    if call in seen.phase(rank, step, SYNCHRONIZE, "all_reduce"):
        return len(ready) + 1
    return sum(when <= call.start for _, when in ready)


def begun_late(found: list[Bucket]) -> list[Bucket]:
    """Those that began when another gradient had come. The last of all is full when backward ends, and may wait."""
    return [bucket for bucket in found if bucket.begun > bucket.due]


def told(seen: Seen, found: list[Bucket], gradients: int) -> str:
    """What is late, in words."""
    late = begun_late(found)
    first = late[0]
    when = f"began with gradient {first.begun}" if first.begun <= gradients else "began in synchronize()"
    return (
        f"{len(late)} of {len(found)} buckets began later than they could. Bucket {first.number} of "
        f"{first.call.nbytes} bytes was full with gradient {first.due} of {gradients}, and its all-reduce {when}."
    )
