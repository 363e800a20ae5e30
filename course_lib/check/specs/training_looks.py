"""What can be wrong in the training of exercises 05 and 06, found in the evidence. Each gives None when all is well."""

import re
from dataclasses import replace

import torch

from course_lib.check import findings
from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.training_seen import COURSES, OURS, Seen, complete, first_off


def ended_badly(e: Evidence) -> Wrong | None:
    """As in any exercise, with the barriers of the check's own loop told as such."""
    wrong = findings.ended_badly(e)
    return wrong and replace(wrong, text=of_the_loop(wrong.text))


def of_the_loop(text: str) -> str:
    """How a run ended, without lines of the loop that trains: the learner has no such file."""
    at = rf"\({re.escape(OURS)}line \d+\)"
    text = re.sub(rf"barrier (with 0 bytes )?{at}", "a barrier of the check", text)
    return re.sub(rf" {at}", "", text)


def values(e: Evidence) -> Wrong | None:
    """Equal to one process on the whole batch after every step."""
    off = first_off(e)
    return off and Wrong("values", off.text, off.seen.number)


def start(e: Evidence) -> Wrong | None:
    """At the first forward all ranks have the parameters and buffers with which rank 0 came."""
    for seen in complete(e):
        for name, want in seen.truth.start.items():
            for rank in seen.ranks:
                if not torch.equal(seen.answers[rank].tensors[f"start/{name}"], want):
                    text = f"{seen.case.story}: at the first forward {name} of rank {rank} is not that of rank 0"
                    if rank == 0:
                        text = f"{seen.case.story}: at the first forward {name} of rank 0 is not what it was"
                    return Wrong("start", f"{text}.", seen.number)
    return None


def bits(e: Evidence) -> Wrong | None:
    """All ranks have the same weights, to the last bit, after every step."""
    for seen in complete(e):
        for step in seen.steps:
            for name in seen.truth.weight:
                first = seen.value("weight", 0, name, step)
                for rank in seen.ranks:
                    if not torch.equal(seen.value("weight", rank, name, step), first):
                        text = (
                            f"{seen.case.story}: after step {step} {name} has not the same bits on ranks 0 and {rank}."
                        )
                        return Wrong("bits", text, seen.number)
    return None


def ready_made(e: Evidence) -> Wrong | None:
    """A finished wrapper does the work, in Python or in C++."""
    for number in e.answers:
        seen = Seen(e, number)
        for rank, answer in enumerate(seen.answers):
            if answer and (inside := answer.facts.get("ready_made")):
                return Wrong("ready_made", f"{seen.case.story}: in the wrapper of rank {rank} is a {inside}.", number)
            if any(m.where.startswith(COURSES) for m in seen.calls(rank)):
                text = f"{seen.case.story}: on rank {rank} a wrapper of course_lib.parallel makes the calls."
                return Wrong("ready_made", text, number)
            if found := [m for m in seen.calls(rank) if m.where.startswith(OURS)]:
                text = f"{seen.case.story}: on rank {rank} torch's own code calls {found[0].op} during the step."
                return Wrong("ready_made", text, number)
    return None


def kept(e: Evidence) -> Wrong | None:
    """Handles that are over must go, or memory grows with each step."""
    for seen in complete(e):
        for rank in seen.ranks:
            alive = seen.answers[rank].facts["kept"]
            made = max(len(seen.step(rank, step)) for step in seen.steps)
            if alive > 2 * made and seen.case.steps > 2:
                text = (
                    f"{seen.case.story}: after {seen.case.steps} steps rank {rank} still has the handles of {alive} "
                    f"collectives that are over; a step makes {made} at most."
                )
                return Wrong("handles", text, seen.number, "kept")
    return None


def handles(e: Evidence) -> Wrong | None:
    """What is under way must be over when `synchronize` returns, and nobody may touch it before."""
    for seen in complete(e):
        zero = e.zero[seen.number]
        for rank in seen.ranks:
            facts = seen.answers[rank].facts
            for step in seen.steps:
                for m in seen.step(rank, step):
                    if m.end is None or m.end + zero > facts["times"][step][3]:
                        what = f"step {step}, rank {rank}: {m.op} of {m.nbytes} bytes ({m.where})"
                        text = f"{seen.case.story}: {what} was not waited for before synchronize() returned."
                        return Wrong("handles", text, seen.number, "open")
            if facts["touched"]:
                m = seen.calls(rank, "all_reduce", "broadcast", "reduce")[facts["touched"][0]]
                text = f"rank {rank} changed the tensor of an {m.op} ({m.where}) before it had waited for it."
                return Wrong("handles", f"{seen.case.story}: {text}", seen.number, "touched")
    return None
