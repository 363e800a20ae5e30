"""Exercise 05: a wrapper that averages gradients after backward, so that N ranks train like one process."""

import random

from course_lib.check.findings import destroyed
from course_lib.check.group import TALK, Evidence, GroupCase, GroupSpec, Wrong
from course_lib.check.specs.data_parallel_mistakes import (
    GATHERS,
    MISTAKES,
    REDUCES,
    gathers_more_than_shards,
    spread_again,
    too_few,
)
from course_lib.check.specs.training_looks import bits, ended_badly, handles, kept, ready_made, start, values
from course_lib.check.specs.training_oracle import case
from course_lib.check.specs.training_seen import FORWARD, Seen, complete
from course_lib.launch import Message

ALLOWED = TALK | {"all_reduce", "all_reduce_coalesced", "broadcast", "barrier"}


def cases(rng: random.Random) -> list[GroupCase]:
    """Each trap on three ranks; then two ranks, for a number of steps that nobody can know; then one."""
    steps = {"plain": 3, "frozen": 2, "tied": 2, "norm": 2, "branch": 3}
    traps = [case(rng, model, model, 3, {}, count) for model, count in steps.items()]
    return [*traps, case(rng, "long", "line", 2, {}, rng.randint(11, 16)), case(rng, "plain", "plain", 1, {}, 2)]


def elsewhere(e: Evidence) -> Wrong | None:
    """Gradients are right on all ranks, and have not travelled by torch.distributed."""
    for seen in complete(e):
        for step in seen.steps:
            nbytes = sum(seen.truth.nbytes[name] for name in seen.needed(step))
            sent = sum(m.nbytes for rank in seen.ranks for m in seen.step(rank, step))
            if sent < (seen.case.world - 1) * nbytes:
                text = (
                    f"{seen.case.story}: step {step}: the gradients have {nbytes} bytes, and in all calls of "
                    f"torch.distributed the {seen.case.world} ranks sent {sent}."
                )
                return Wrong("traffic", text, seen.number, "Gradients travel by dist.all_reduce here.")
    return None


def other_calls(e: Evidence, shards: bool = False) -> Wrong | None:
    """Collectives that send more than an all-reduce does, or through one rank, or nothing at all.

    shards  a reduce-scatter and an all-gather of its shards may be, since they are an all-reduce in two halves
    """
    for seen in complete(e):
        for rank in seen.ranks:
            for step in seen.steps:
                if m := next((m for m in seen.step(rank, step, "barrier") if step or not _before(seen, rank, m)), None):
                    text = f"{seen.case.story}: step {step}, rank {rank}: {m.op} ({m.where})."
                    return Wrong("traffic", text, seen.number)
                more = REDUCES + GATHERS if shards and not gathers_more_than_shards(seen, rank, step) else ()
                if m := next((m for m in seen.step(rank, step) if m.op not in ALLOWED and m.op not in more), None):
                    text = f"{seen.case.story}: step {step}, rank {rank}: {m.op} ({m.where})."
                    return Wrong("traffic", text, seen.number, "Gradients travel by dist.all_reduce here.")
    return None


def _before(seen: Seen, rank: int, m: Message) -> bool:
    """In the first forward, in which a wrapper may still get ready."""
    return m in seen.phase(rank, 0, FORWARD)


def in_parts(e: Evidence) -> Wrong | None:
    """The other calls of exercise 05."""
    return other_calls(e, shards=True)


def traffic(e: Evidence) -> Wrong | None:
    """Each gradient goes through one all-reduce a step. A little more may count users."""
    for seen in complete(e):
        for rank in seen.ranks:
            for step in seen.steps:
                if text := too_few(seen, rank, step) or _too_much(seen, rank, step):
                    return Wrong("traffic", f"{seen.case.story}: step {step}, rank {rank}: {text}", seen.number)
    return None


def _too_much(seen: Seen, rank: int, step: int) -> str | None:
    sizes, calls = seen.truth.nbytes, seen.step(rank, step)
    reduced = [m.nbytes for m in calls if m.op in REDUCES]
    padding = 8 * len(sizes) * (seen.case.world if any("scatter" in m.op for m in calls) else 1)
    if len(reduced) > len(sizes) + 1 or sum(reduced) > seen.nbytes + padding:
        found = f"{len(reduced)} all-reduces with {sum(reduced)} bytes"
        return f"{found}; the {len(sizes)} gradients have {seen.nbytes} bytes."
    return spread_again(seen, rank, step)


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    looks = (ready_made, destroyed, start, handles, values, ended_badly, bits, elsewhere, in_parts, traffic, kept)
    for look in looks:
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    seen = next(complete(e, group="plain", world=3))
    reduced = [m.nbytes for m in seen.step(0, 1, "all_reduce")]
    sent = f"{len(reduced)} all-reduces with {sum(reduced)} bytes" if reduced else "messages of your own"
    steps = sum(case.steps for case in e.cases)
    return [
        f"equal to one process on the whole batch after each of {steps} steps, on 1, 2 and 3 ranks (rtol 1e-10)",
        "frozen parameters, tied weights, BatchNorm, and branches that leave parameters out",
        "all ranks start from rank 0's parameters and buffers, and keep the same bits",
        f"a step of the plain model: {sent} for {seen.nbytes} bytes of gradients",
    ]


SPEC = GroupSpec("05_data_parallelism", "NaiveDDP", 10, cases, compare, MISTAKES, praise, "plain")
