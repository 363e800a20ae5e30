"""Ranks that do not call the same collectives in the same order, each with the sentence that names it."""

from course_lib.check.group import TALK, Evidence, Wrong
from course_lib.check.specs.training_seen import Seen
from course_lib.launch import Message


def parting(seen: Seen) -> tuple[int, Message, Message] | None:
    """The first place in the order of this step's collectives at which rank 0 and another one call different things."""
    calls = [[m for m in seen.last_step(rank)[1] if m.op not in TALK] for rank in seen.ranks]
    for other in calls[1:]:
        for number, (a, b) in enumerate(zip(calls[0], other, strict=False)):
            if (a.op, a.nbytes) != (b.op, b.nbytes):
                return number, a, b
    return None


def barrier_between(e: Evidence, wrong: Wrong) -> str | None:
    """A barrier meets something else."""
    seen = Seen(e, wrong.case)
    found = parting(seen)
    if found is None or "barrier" not in (found[1].op, found[2].op):
        return None
    at, other = sorted(found[1:], key=lambda m: m.op != "barrier")
    why = (
        " What a rank calls must not depend on the gradients that it has."
        if seen.case.group in ("branch", "gap")
        else ""
    )
    return (
        f"Rank {at.rank} calls barrier ({at.where}) where rank {other.rank} calls {other.op} ({other.where}). "
        f"A barrier is a collective, too, and counts in the order.{why} Leave it out: an all-reduce ends only when all "
        "ranks take part."
    )


def other_size(e: Evidence, wrong: Wrong) -> str | None:
    """All call the same, and one brings fewer bytes than the gradient at this place has."""
    seen = Seen(e, wrong.case)
    found = parting(seen)
    if found is None or found[1].op != "all_reduce" or found[2].op != "all_reduce":
        return None
    small, large = sorted(found[1:], key=lambda m: m.nbytes)
    step, calls = seen.last_step(small.rank)
    given = [m.nbytes for m in calls if m.op == "all_reduce" and m.start <= small.start]
    used = [nbytes for name, nbytes in seen.truth.nbytes.items() if name in seen.used(small.rank, step)]
    if large.nbytes not in seen.truth.nbytes.values() or given in (used[: len(given)], used[::-1][: len(given)]):
        return None  # it has left out some
    return (
        f"Rank {small.rank} gives {small.nbytes} bytes to an all-reduce ({small.where}) to which rank {large.rank} "
        f"gives {large.nbytes}. Where a gradient is missing, zeros must have its shape and its dtype, here float64: "
        "torch.zeros_like(parameter)."
    )


def broadcast_on_some_ranks(e: Evidence, wrong: Wrong) -> str | None:
    """A rank waits in a broadcast, and another one has gone past it or did not come to it."""
    seen = Seen(e, wrong.case)
    counts = {rank: len(seen.calls(rank, "broadcast")) for rank in seen.ranks}
    waiting = [m for rank in seen.ranks for m in seen.calls(rank, "broadcast", "send", "recv") if m.end is None]
    if not waiting or len(set(counts.values())) == 1:
        return None
    m = waiting[0]
    other = next(rank for rank, count in counts.items() if count != counts[m.rank])
    return (
        f"Rank {m.rank} waits in {m.op} ({m.where}), and has begun {counts[m.rank]} broadcasts; rank {other} began "
        f"{counts[other]}. A broadcast is a call of all ranks, those that receive as well: no `if rank == 0` around it."
    )


def _parts_where(seen: Seen) -> str:
    used = [len(seen.used(rank, 0)) for rank in seen.ranks]
    text = (
        "Ranks take different branches here, so they have different gradients: in step 0 "
        + ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(used))
        + f" of {len(seen.truth.grad)}."
    )
    if found := parting(seen):
        _, a, b = found
        text += f" Rank {a.rank} calls {a.op} of {a.nbytes} bytes where rank {b.rank} calls {b.op} of {b.nbytes}."
    return text


def order_of_arrival(e: Evidence, wrong: Wrong) -> str | None:
    """Each rank begins with the gradients that it has, from the last to the first."""
    seen = Seen(e, wrong.case)
    found = parting(seen)
    if seen.case.group != "branch" or found is None:
        return None
    for rank in (found[1].rank, found[2].rank):
        step, calls = seen.last_step(rank)
        sizes = [m.nbytes for m in calls[: found[0] + 1] if m.op == "all_reduce"]
        arrived = [seen.truth.nbytes[name] for name in reversed(seen.used(rank, step))]
        if sizes != arrived[: len(sizes)]:
            return None
    return (
        f"{_parts_where(seen)} Each rank begins with the gradients that it has, as backward brings them, from the last "
        "to the first: so the same place in the order belongs to different parameters. Take an order that no branch "
        "changes, that of module.parameters(), with zeros at the place of a gradient that is missing."
    )


def skips_unused(e: Evidence, wrong: Wrong) -> str | None:
    """The ranks did not make the same all-reduces, where they do not use the same parameters."""
    seen = Seen(e, wrong.case)
    if seen.case.group != "branch" or seen.case.world == 1:
        return None
    sizes = [[m.nbytes for m in seen.calls(rank, "all_reduce")] for rank in seen.ranks]
    shortest = min(map(len, sizes))
    if all(found[:shortest] == sizes[0][:shortest] for found in sizes) and wrong.kind == "values":
        return None
    return (
        f"{_parts_where(seen)} Who leaves out an all-reduce that others make, or makes it at another place, lets them "
        "wait for ever, or adds what does not belong together. All ranks must make the same calls in the same order: "
        "with zeros where there is no gradient."
    )
