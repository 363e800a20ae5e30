"""Exercise 06: gradients in buckets, each of which is reduced while backward still computes the next ones."""

import random

from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, GroupCase, GroupSpec, Wrong
from course_lib.check.specs.data_parallel import other_calls
from course_lib.check.specs.overlap_mistakes import MISTAKES, capacity, fill
from course_lib.check.specs.training_oracle import case
from course_lib.check.specs.training_seen import Seen, bits, complete, handles, ready_made, start, values

CAPACITY = 4000  # bytes of a bucket for the deep model: five buckets, two of them a single tensor that is larger
SMALL = 400  # ... for the others
EXACT = 5680  # three buckets of the deep model, that are nearly full: five when a MiB is taken for 10**6 bytes


def cases(rng: random.Random) -> list[GroupCase]:
    """Three ranks: where overlap shows, then the traps, then a rank that is late; two ranks; one."""
    deep, small, exact = ({"bucket_mb": nbytes / 2**20} for nbytes in (CAPACITY, SMALL, EXACT))
    traps = [case(rng, model, model, 3, small) for model in ("frozen", "tied", "branch")]
    late = case(rng, "late", "deep", 3, deep, steps=1, patient=rng.randrange(3))
    few = [case(rng, "deep", "deep", ranks, exact, steps=2) for ranks in (2, 1)]
    return [case(rng, "deep", "deep", 3, deep), *traps, late, *few]


def early(seen: Seen, rank: int, step: int) -> int:
    """Bytes of the all-reduces that had begun when backward had the last gradient."""
    last = max(when for _, when in seen.ready(rank, step))
    return sum(m.nbytes for m in seen.step(rank, step, "all_reduce") if m.start < last)


def overlapping(e: Evidence) -> Wrong | None:
    """When the last gradient comes, everything but the last bucket must be under way."""
    for seen in complete(e, group="deep"):
        for rank in seen.ranks:
            for step in seen.steps:
                begun = early(seen, rank, step)
                if seen.nbytes - begun > capacity(seen):
                    text = (
                        f"{seen.case.story}: step {step}, rank {rank}: when backward had the last gradient, "
                        f"all-reduces of {begun} of {seen.nbytes} bytes had begun; all but the last bucket, of "
                        f"{capacity(seen)} bytes at most, can be under way by then."
                    )
                    return Wrong("overlap", text, seen.number)
    return None


def late(e: Evidence) -> Wrong | None:
    """A rank that waits for others inside backward computes nothing meanwhile."""
    for number, broken in e.broken.items():
        patient = e.cases[number].options.get("patient")
        waiting = [m for m in e.messages[number] if m.op == "all_reduce" and m.end is None and m.rank != patient]
        if patient is not None and broken.deadlock and waiting:
            m = waiting[0]
            text = (
                f"{e.cases[number].story}: here rank {patient} begins its backward only when the others have ended "
                f"theirs, and rank {m.rank} waits for it in {m.op} ({m.where}), inside backward."
            )
            return Wrong("hangs", text, number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """Buckets as full as the rule makes them, and no fuller. One small all-reduce more may count users."""
    for seen in complete(e):
        most = len(fill(seen.truth.nbytes.values(), capacity(seen), backwards=True)) + 1
        for rank in seen.ranks:
            for step in seen.steps:
                if text := _wrong_traffic(seen, rank, step, most):
                    return Wrong("traffic", f"{seen.case.story}: step {step}, rank {rank}: {text}", seen.number)
    return None


def _wrong_traffic(seen: Seen, rank: int, step: int, most: int) -> str | None:
    sizes, calls = seen.truth.nbytes, seen.step(rank, step)
    reduced = [m.nbytes for m in calls if m.op == "all_reduce"]
    if fat := [n for n in reduced if n > capacity(seen) and n not in sizes.values()]:
        return f"an all-reduce of {fat[0]} bytes; a bucket holds {capacity(seen)} bytes, or a single larger tensor."
    if len(reduced) > most or sum(reduced) > seen.nbytes + 8 * len(sizes):
        found = f"{len(reduced)} all-reduces with {sum(reduced)} bytes"
        return f"{found}; {most - 1} buckets are enough for the {seen.nbytes} bytes of {len(sizes)} gradients."
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    looks = (ready_made, destroyed, start, handles, values, late, ended_badly, bits, other_calls, overlapping, traffic)
    for look in looks:
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
        f"{len(reduced)} all-reduces for {len(seen.truth.nbytes)} gradients of the deep model, none over capacity",
        f"{begun} of {seen.nbytes} bytes were under way before backward had its last gradient",
        "nobody waits inside backward, and everything is waited for before synchronize() returns",
    ]


SPEC = GroupSpec("06_buckets_and_overlap", "BucketedDDP", 15, cases, compare, MISTAKES, praise, "deep")
