"""Exercise 12, first part: ZeRO-1. Judged: weights, bits, how much each rank's optimizer keeps, and bytes."""

import random

from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, GroupCase, GroupSpec, Wrong
from course_lib.check.specs.zero_one_drive import ADAM, MOMENTUM, SGD
from course_lib.check.specs.zero_one_mistakes import MISTAKES
from course_lib.check.specs.zero_one_oracle import case
from course_lib.check.specs.zero_one_seen import complete, values


def cases(rng: random.Random) -> list[GroupCase]:
    """Weights that the ranks do not divide and weights that they do; one trap each; four ranks to one."""
    return [
        case(rng, "plain", 4, ADAM),
        case(rng, "tied", 4, MOMENTUM),
        case(rng, "frozen", 3, MOMENTUM),
        case(rng, "branch", 3, SGD),  # without momentum None and zero do the same
        case(rng, "plain", 2, ADAM),
        case(rng, "plain", 1, ADAM),
    ]


def ready_made(e: Evidence) -> Wrong | None:
    """A finished class does the work."""
    for seen in complete(e):
        for rank, answer in enumerate(seen.answers):
            if inside := answer.facts["ready_made"]:
                text = f"{seen.case.story}: on rank {rank} a {inside} does the work."
                return Wrong("ready_made", text, seen.number)
    return None


def handles(e: Evidence) -> Wrong | None:
    """What was started in a step must be over when it ends."""
    for seen in complete(e):
        for rank in seen.ranks:
            for step in seen.case.steps:
                end = seen.answers[rank].facts["times"][step][1] - e.zero[seen.number]
                for m in seen.calls(rank, step):
                    if m.end is None or m.end > end:
                        what = f"step {step}, rank {rank}: {m.op} of {m.nbytes} bytes ({m.where})"
                        return Wrong("handles", f"{seen.case.story}: {what} was not waited for.", seen.number)
    return None


def bits(e: Evidence) -> Wrong | None:
    """All ranks have the same weights, to the last bit."""
    for seen in complete(e):
        for step in seen.case.steps:
            for rank in seen.ranks:
                same = seen.got(rank, step) == seen.got(0, step)
                if not same.all():
                    name = seen.case.names[int((~same).nonzero()[0])]
                    text = f"after step {step} the weight {name} has not the same bits on ranks 0 and {rank}."
                    return Wrong("bits", f"{seen.case.story}: {text}", seen.number)
    return None


def state(e: Evidence) -> Wrong | None:
    """Each rank keeps about an N-th of what the whole optimizer would keep."""
    for seen in complete(e):
        case = seen.case
        for rank, answer in enumerate(seen.answers):
            if answer.facts["state"] > seen.most_kept:
                whole = case.kept * case.numbers
                text = (
                    f"the optimizer of rank {rank} keeps {answer.facts['state']} numbers. One process would keep "
                    f"{whole}, so {case.world} ranks should keep about {-(-whole // case.world)} each."
                )
                return Wrong("state", f"{case.story}: {text}", seen.number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """A rank sends no more than a reduce-scatter and an all-gather do."""
    for seen in complete(e):
        for rank in seen.ranks:
            for step in seen.case.steps:
                if seen.sent(rank, step) > seen.most_sent:
                    calls = ", ".join(f"{m.op} of {m.nbytes} bytes" for m in seen.calls(rank, step)[:4])
                    text = (
                        f"step {step}, rank {rank}: {calls}. Over a ring a rank sends {seen.sent(rank, step):.0f} "
                        f"bytes for that; a reduce-scatter and an all-gather of these weights need {seen.fair:.0f}."
                    )
                    return Wrong("traffic", f"{seen.case.story}: {text}", seen.number)
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (ready_made, destroyed, handles, values, ended_badly, bits, state, traffic):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    seen = next(complete(e, group="plain", world=4))
    kept = ", ".join(str(answer.facts["state"]) for answer in seen.answers)
    steps = sum(len(each.weights) for each in e.cases)
    return [
        f"equal to one process with the whole optimizer after each of {steps} steps, on 1 to 4 ranks (rtol 1e-10), "
        "and the same bits on all ranks",
        "SGD, SGD with momentum, Adam; frozen, tied and unused parameters",
        f"Adam for {seen.case.numbers} weights keeps {seen.case.kept * seen.case.numbers} numbers in one process, and "
        f"{kept} on your four ranks",
        f"bytes that a rank sends in a step, over a ring: {seen.sent(0, 0):.0f}, as an all-reduce of the gradients "
        f"does ({seen.fair:.0f}, with no padding)",
    ]


SPEC = GroupSpec("12_memory_and_beyond", "ZeroOne", 8, cases, compare, MISTAKES, praise, "plain")
