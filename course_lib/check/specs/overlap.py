"""Exercise 06: gradients in buckets, each of which is reduced while backward still computes the next ones."""

import random

from course_lib.check.findings import destroyed
from course_lib.check.group import Evidence, GroupCase, GroupSpec, Wrong
from course_lib.check.specs.data_parallel import elsewhere, other_calls
from course_lib.check.specs.data_parallel_mistakes import spread_again
from course_lib.check.specs.overlap_mistakes import MISTAKES
from course_lib.check.specs.overlap_seen import begun_late, buckets, capacity, fill, told
from course_lib.check.specs.training_looks import (
    bits,
    ended_badly,
    handles,
    kept,
    of_the_loop,
    ready_made,
    start,
    values,
)
from course_lib.check.specs.training_models import GAPS
from course_lib.check.specs.training_oracle import TrainCase, case
from course_lib.check.specs.training_seen import Seen, complete

CAPACITY = 4000  # bytes of a bucket for the deep model: five buckets, two of them a single tensor that is larger
SMALL = 400  # ... for the others
EXACT = 2176  # four buckets of the model with a gap, two of them full to the last byte
TINY = 16  # no gradient of the deep model fits into a bucket


def cases(rng: random.Random) -> list[GroupCase]:
    """Three ranks: where overlap shows, then the traps, then a rank that is late; two ranks with a gap; one."""
    deep, small, tiny = ({"bucket_mb": nbytes / 2**20} for nbytes in (CAPACITY, SMALL, TINY))
    steps = {"frozen": 2, "tied": 2, "branch": 3, "waiting": 2}
    traps = [case(rng, model, model, 3, small, count) for model, count in steps.items()]
    late = case(rng, "late", "deep", 3, deep, steps=1, patient=rng.randrange(3), prompt=True)
    few = [gap(rng), case(rng, "tiny", "deep", 1, tiny, steps=2)]
    return [case(rng, "deep", "deep", 3, deep, prompt=True), *traps, late, *few]


def gap(rng: random.Random) -> TrainCase:
    """Two ranks, for a number of steps that nobody can know; in one of them one rank leaves out a layer.

    The other one is late in each step.
    """
    steps, rank = rng.randint(6, 10), rng.randrange(2)
    ways = [[0, 0] for _ in range(steps)]
    ways[rng.randint(1, steps - 3)][rank] = rng.choice(GAPS)
    return case(rng, "gap", "gap", 2, {"bucket_mb": EXACT / 2**20}, steps, ways, patient=1 - rank, prompt=True)


def early(seen: Seen, rank: int, step: int) -> int:
    """Bytes of the all-reduces that had begun when backward had the last gradient."""
    last = max(when for _, when in seen.ready(rank, step))
    return sum(m.nbytes for m in seen.step(rank, step, "all_reduce") if m.start < last)


def overlapping(e: Evidence) -> Wrong | None:
    """A bucket is under way as soon as it is full; when the last gradient comes, all but the last bucket are."""
    for seen in complete(e):
        for rank in seen.ranks if seen.case.world > 1 else ():  # one rank may send nothing
            for step in seen.steps:
                by_rule = buckets(seen, rank, step)
                if by_rule is None:
                    text = _too_little(seen, rank, step) if seen.case.group == "deep" else None
                else:
                    text = told(seen, by_rule, len(seen.ready(rank, step))) if begun_late(by_rule) else None
                if text:
                    return Wrong("overlap", f"{seen.case.story}: step {step}, rank {rank}: {text}", seen.number)
    return None


def _too_little(seen: Seen, rank: int, step: int) -> str | None:
    begun = early(seen, rank, step)
    if seen.nbytes - begun <= capacity(seen):
        return None
    return (
        f"when backward had the last gradient, all-reduces of {begun} of {seen.nbytes} bytes had begun; all but the "
        f"last bucket, of {capacity(seen)} bytes at most, can be under way by then."
    )


def late(e: Evidence) -> Wrong | None:
    """A rank that waits for others inside backward computes nothing meanwhile."""
    for number, broken in e.broken.items():
        seen = Seen(e, number)
        patient = seen.case.options.get("patient")
        if patient is None or broken.culprit is not None:
            continue
        story = (
            f"{seen.case.story}: here rank {patient} begins its backward only when the others have ended theirs, and"
        )
        told = of_the_loop(broken.text)
        for rank in seen.ranks:
            sent = seen.in_backward(rank)
            if rank == patient or not sent:
                continue
            waiting = [m for m in sent if m.end is None]
            if broken.deadlock and waiting:
                m = waiting[0]
                return Wrong(
                    "hangs", f"{story} rank {rank} waits for it in {m.op} ({m.where}), inside backward.", number
                )
            return Wrong("hangs", f"{story} rank {rank} does not come to the end of its own.\n{told}", number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """Buckets as full as the rule makes them, and no fuller. One small all-reduce more may count users.

    For that it may have 8 bytes for each parameter, frozen ones too.
    """
    for seen in complete(e):
        buckets = len(fill(seen.truth.nbytes.values(), capacity(seen), backwards=True))
        for rank in seen.ranks:
            for step in seen.steps:
                if text := _wrong_traffic(seen, rank, step, buckets):
                    return Wrong("traffic", f"{seen.case.story}: step {step}, rank {rank}: {text}", seen.number)
    return None


def _wrong_traffic(seen: Seen, rank: int, step: int, buckets: int) -> str | None:
    sizes, calls = seen.truth.nbytes, seen.step(rank, step)
    reduced = [m.nbytes for m in calls if m.op == "all_reduce"]
    most = 8 * len(seen.parameters)
    if fat := [n for n in reduced if n > max(capacity(seen), most) and n not in sizes.values()]:
        return f"an all-reduce of {fat[0]} bytes; a bucket holds {capacity(seen)} bytes, or a single larger tensor."
    users = sum(reduced) - seen.nbytes
    if len(reduced) > buckets + (users > 0) or users > most:
        found = f"{len(reduced)} all-reduces with {sum(reduced)} bytes"
        return f"{found}; {buckets} buckets are enough for the {seen.nbytes} bytes of {len(sizes)} gradients."
    return spread_again(seen, rank, step)


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    first = (ready_made, destroyed, start, handles, values, late, ended_badly, bits)
    for look in (*first, elsewhere, other_calls, overlapping, traffic, kept):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    seen = next(complete(e, group="deep", world=3))
    reduced = seen.step(0, 1, "all_reduce")
    begun = early(seen, 0, 1)
    steps = sum(case.steps for case in e.cases)
    return [
        f"equal to one process on the whole batch after each of {steps} steps, on 1, 2 and 3 ranks (rtol 1e-10)",
        "frozen parameters, tied weights, and branches that leave parameters out; the same bits on all ranks",
        "after a step in which a gradient was missing, buckets begin in time again",
        f"{len(reduced)} all-reduces for {len(seen.truth.nbytes)} gradients of the deep model, none over capacity",
        f"{begun} of {seen.nbytes} bytes were under way before backward had its last gradient",
        "nobody waits inside backward, and everything is waited for before synchronize() returns",
    ]


SPEC = GroupSpec("06_buckets_and_overlap", "BucketedDDP", 15, cases, compare, MISTAKES, praise, "deep")
