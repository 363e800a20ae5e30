"""Mistakes of the ring in which right sums are made, but not in the tensor, or not on every rank.

All are proved by the traced case: what was sent and received, and what the tensor held at that moment.
"""

from course_lib.check.group import Evidence, RankAnswer, Wrong
from course_lib.check.specs.ring_trace import LENGTH, Content, content, in_words, trace
from course_lib.collectives.tracked import Event


def _traced(e: Evidence) -> tuple[int, tuple, list[RankAnswer]] | None:
    """World size, inputs and answers of the traced case with most ranks, at least 3."""
    for world in (4, 3):
        if numbers := e.numbers(world=world, traced=True):
            return world, e.cases[numbers[0]].inputs, e.answers[numbers[0]]
    return None


def _inside(event: Event, world: int) -> Content | None:
    return content(event.payload[0], world) if event.length == LENGTH else None


def _all_finished(answer: RankAnswer, world: int) -> bool:
    """Every finished chunk passed through this rank's messages."""
    seen = [_inside(event, world) for event in answer.events]
    return all({(rank, chunk): 1 for rank in range(world)} in seen for chunk in range(world))


def only_reduce_scatter(e: Evidence, wrong: Wrong) -> str | None:
    t = trace(e, 4) or trace(e, 3)
    if t is None or not t.whole_chunks_sent or any(len(sends) != t.world - 1 for sends in t.sends):
        return None
    owned = [[c for c in range(t.world) if found[c] == t.right(c)] for found in t.end]
    if any(len(chunks) != 1 for chunks in owned) or len({chunks[0] for chunks in owned}) != t.world:
        return None
    return (
        f"After {t.world - 1} steps each rank has one finished chunk (rank 0 has chunk {owned[0][0]}), and there it "
        "ends. The second phase, all-gather, is missing: N - 1 more steps, in which the finished chunks go around."
    )


def copy_not_copied_back(e: Evidence, wrong: Wrong) -> str | None:
    if (found := _traced(e)) is None:
        return None
    world, inputs, answers = found
    for answer, given in zip(answers, inputs, strict=True):
        in_tensor = any(event.offset is not None for event in answer.events)
        if in_tensor or answer.after.tolist() != given.tolist() or not _all_finished(answer, world):
            return None
    return (
        "The right sums were made, but in a copy: `tensor` holds what it held before. Copy the result back at the end, "
        "tensor.copy_(...), or work on views of `tensor`."
    )


def makes_new_tensors(e: Evidence, wrong: Wrong) -> str | None:
    if (found := _traced(e)) is None:
        return None
    world, _, answers = found
    if all(_all_finished(answer, world) for answer in answers):
        return _sum_elsewhere(world, answers[0])
    return _sum_lost(world, answers)


def _sum_elsewhere(world: int, answer: RankAnswer) -> str | None:
    """`chunks[i] = chunks[i] + x`: sums leave from memory that is no part of the tensor, which does not hold them."""
    for event in answer.events:
        inside = _inside(event, world)
        if event.kind != "send" or event.offset is not None or not inside or len(inside) < 2:
            continue
        chunk = next(iter(inside))[1]
        held = content(event.state[chunk * LENGTH], world)
        if held != inside:
            return (
                f"Rank {event.rank} sent a chunk {chunk} with {in_words(inside, chunk)} in it, but not from `tensor`: "
                f"there chunk {chunk} held {in_words(held, chunk)}. `chunks[i] = chunks[i] + x` and `chunks[i] = x` "
                "put another tensor into the list; `chunks[i] += x` and `chunks[i].copy_(x)` write into this one."
            )
    return None


def _sum_lost(world: int, answers: list[RankAnswer]) -> str | None:
    """`mine = mine + arrived`: nothing that arrives in reduce-scatter changes the tensor, and no sum is sent."""
    steps = world - 1
    for rank, answer in enumerate(answers):
        sends = [event for event in answer.events if event.kind == "send"][:steps]
        receives = [event for event in answer.events if event.kind == "recv"][:steps]
        if len(sends) < steps or len(receives) < steps:
            return None
        if any(event.offset is not None or event.after != event.state for event in receives):
            return None
        if any({r for r, _ in _inside(event, world) or ()} != {rank} for event in sends):
            return None
    return (
        "In the first phase nothing that arrives is added to `tensor`: after each receive it is as before. "
        "`mine = mine + arrived` makes a new tensor, `mine += arrived` adds into the chunk."
    )
