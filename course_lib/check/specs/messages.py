"""Exercise 02: pass a tensor on around a ring of ranks, without a deadlock."""

import random

import torch

from course_lib.check.findings import (
    destroyed,
    ended_badly,
    first_difference,
    handles,
    ready_made,
    shape_text,
    told_apart,
)
from course_lib.check.group import HANDLE, KINDS, Evidence, GroupCase, GroupSpec, RankAnswer, Wrong
from course_lib.check.known import (
    COMMON_FIRST,
    COMMON_HANDLES,
    COMMON_HANGS,
    buffer_dtype,
    known,
    right_and_wrong,
    right_worlds,
)

WORLDS = (4, 3, 2, 1)
LARGE = 100_000  # elements


def _case(group: str, inputs: list[torch.Tensor], **more) -> GroupCase:
    world = len(inputs)
    want = tuple(inputs[rank - 1] for rank in range(world))
    return GroupCase(group, f"{world} rank{'s' * (world > 1)}, {shape_text(inputs[0])}", tuple(inputs), want, **more)


def cases(rng: random.Random) -> list[GroupCase]:
    """Fresh numbers each time; for each number of ranks the same kinds of cases."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))

    def floats(world: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]

    found = []
    for n in WORLDS:
        found.append(_case("plain", floats(n, rng.randint(5, 50))))
        if n > 1:
            traced = [torch.arange(8.0, dtype=torch.float64) + 100 * rank for rank in range(n)]
            found.append(_case("late", traced, traced=True, late=rng.randrange(n)))
        found.append(_case("shapes", [torch.randint(-9, 2**60, (3, 5), generator=generator) for _ in range(n)]))
        found.append(_case("shapes", floats(n, 2, rng.randint(2, 4), 3, dtype=torch.bfloat16)))
        found.append(_case("sizes", floats(n, 0)))
        found.append(_case("sizes", floats(n, 1, dtype=torch.float64)))
        found.append(_case("sizes", floats(n, LARGE)))
    return found


def result(answer: RankAnswer) -> torch.Tensor | None:
    """What the rank returned, if it is a tensor."""
    return answer.after if answer.itself else answer.value


def _same(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    return got is not None and got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want)


def values(e: Evidence) -> Wrong | None:
    """The first rank whose result is not its left neighbour's tensor."""
    for number in e.numbers():
        case = e.cases[number]
        for rank, (answer, want) in enumerate(zip(e.answers[number], case.expected, strict=True)):
            got, left = result(answer), (rank - 1) % case.world
            if got is None:
                thing = f"a {HANDLE}" if answer.returned == HANDLE else f"a value of type {answer.returned}"
                return Wrong("values", f"{case.story}: rank {rank} returned {thing} instead of a tensor.", number)
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                what = f"the tensor of rank {left} is {_kind(want)}, rank {rank} returned {_kind(got)}"
                return Wrong("values", f"{case.story}: {what}.", number)
            exact = want.double() if want.is_floating_point() else want
            if not _same(got, want) and (at := first_difference(got, exact, 0.0)) is not None:
                found, right = told_apart(*(t.flatten()[at].item() for t in (got, want)))
                what = f"element {at} on rank {rank} must be {right}, from rank {left}, and is {found}"
                return Wrong("values", f"{case.story}: {what}.", number)
    return None


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def untouched(e: Evidence) -> Wrong | None:
    """The input is as it was."""
    for number in e.numbers():
        case = e.cases[number]
        for rank, answer in enumerate(e.answers[number]):
            if not _same(answer.after, case.inputs[rank]):
                return Wrong("input", f"{case.story}: the input of rank {rank} is no longer what it was.", number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """Each rank sends its tensor once, to its right neighbour."""
    for number in e.numbers():
        case = e.cases[number]
        for rank in range(case.world):
            right, sends = (rank + 1) % case.world, e.sent(number, rank)
            wanted = case.inputs[rank].numel() * case.inputs[rank].element_size() * (case.world > 1)
            far = next((m for m in sends if m.peer != right), None)
            sent = sum(m.nbytes for m in sends)
            if far or sent != wanted:
                to = f" (one to rank {far.peer}, {far.where})" if far else ""
                what = f"rank {rank} sent {sent} bytes in {len(sends)} messages{to}"
                return Wrong("traffic", f"{case.story}: {what}; {wanted} to rank {right} are needed.", number)
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (ready_made, destroyed, values, handles, ended_badly, untouched, traffic):
        if wrong := look(e):
            return wrong
    return None


def _everywhere(e: Evidence, wrong: Wrong, from_whom) -> bool:
    """Whether every rank of the wrong case returned the tensor of rank from_whom(rank, N)."""
    case = e.cases[wrong.case]
    if case.world < 3 or not case.inputs[0].numel():
        return False
    return all(
        _same(result(answer), case.inputs[from_whom(rank, case.world)])
        for rank, answer in enumerate(e.answers[wrong.case])
    )


def returns_nothing(e: Evidence, wrong: Wrong) -> str | None:
    if any(a and a.returned == "None" for a in e.answers[wrong.case]):
        return "Return the tensor that was received."
    return None


def returns_handle(e: Evidence, wrong: Wrong) -> str | None:
    if any(a and a.returned == HANDLE for a in e.answers[wrong.case]):
        return "isend and irecv return a handle. Call its wait(), then return the buffer into which irecv received."
    return None


def wrong_direction(e: Evidence, wrong: Wrong) -> str | None:
    if _everywhere(e, wrong, lambda rank, n: (rank + 1) % n):
        return (
            "Every rank has the tensor of its right neighbour: it went the wrong way round. Send to "
            "(rank + 1) % world_size and receive from (rank - 1) % world_size."
        )
    return None


def returns_own(e: Evidence, wrong: Wrong) -> str | None:
    if _everywhere(e, wrong, lambda rank, n: rank):
        return "Every rank has its own tensor. Receive into a buffer (torch.empty_like(tensor)) and return that."
    return None


def wrong_neighbour(e: Evidence, wrong: Wrong) -> str | None:
    number = wrong.case
    n = e.cases[number].world
    talk = [m for m in e.messages.get(number, ()) if m.peer is not None and m.op != "barrier"]
    to, source = ({(m.peer - m.rank) % n for m in talk if word in m.op} for word in ("send", "recv"))
    if n > 2 and len(to) == 1 and to == source:
        return (
            "Each rank sends to one neighbour and waits for the same neighbour, who sends the other way. What comes "
            "from the left comes from (rank - 1) % world_size."
        )
    return None


def open_chain(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    n = case.world
    if n < 3:
        return None
    talk = [m for m in e.messages.get(wrong.case, ()) if m.peer is not None]
    sends = {(m.rank, m.peer) for m in talk if "send" in m.op}
    if sends == {(rank, rank + 1) for rank in range(n - 1)}:
        return f"Rank {n - 1} sends nothing, so rank 0 gets nothing: a ring is closed, after rank {n - 1} comes rank 0."
    return None


def wrong_shape(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.case not in e.numbers(group="plain") and "returned" in wrong.text:
        return "The result has the shape and dtype of the input: torch.empty_like(tensor) makes such a buffer."
    return None


def modifies_input(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "input" or (wrong.kind == "values" and _changed(e, wrong.case)):
        return "The input belongs to the caller. Receive into a buffer of its own: torch.empty_like(tensor)."
    return None


def _changed(e: Evidence, number: int) -> bool:
    return any(not _same(a.after, x) for a, x in zip(e.answers[number], e.cases[number].inputs, strict=True))


def fails_alone(e: Evidence, wrong: Wrong) -> str | None:
    worlds = right_worlds(e, _values_wrong)
    to_itself = any(m.peer == m.rank for m in e.messages.get(wrong.case, ()))
    if wrong.kind == "raised" and not to_itself:
        return None
    if worlds.get(1) is False and all(right for world, right in worlds.items() if world > 1):
        return "One rank is its own neighbour, and cannot send to itself: then the answer is a copy of the tensor."
    return None


def two_ranks_only(e: Evidence, wrong: Wrong) -> str | None:
    right, bad = right_and_wrong(e, _values_wrong, lambda case: case.inputs[0].numel() > 0)
    if right == {2} and 4 in bad:
        return (
            "It works for 2 ranks only, where left and right neighbour are the same rank. With more, what goes to "
            "(rank + 1) % world_size does not come back from there."
        )
    return None


def _values_wrong(e: Evidence, number: int) -> bool:
    pairs = zip(e.answers[number], e.cases[number].expected, strict=True)
    return any(not _same(result(answer), want) for answer, want in pairs)


def sends_too_much(e: Evidence, wrong: Wrong) -> str | None:
    return "The result is right. But each rank needs only what its left neighbour has: one tensor, sent once."


MISTAKES = (
    *COMMON_FIRST,
    *known(modifies_input, kinds=("input", "values")),
    *known(buffer_dtype, kinds=KINDS),
    *known(returns_nothing, returns_handle, kinds=("values",)),
    *known(wrong_neighbour, kinds=("hangs",)),
    *known(open_chain, kinds=("values", "hangs")),
    *COMMON_HANDLES,
    *COMMON_HANGS,
    *known(fails_alone, kinds=KINDS),
    *known(wrong_direction, returns_own, wrong_shape, kinds=("values",)),
    *known(two_ranks_only, kinds=("values", "hangs")),
    *known(sends_too_much, kinds=("traffic",)),
)


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    number = next(k for k in e.numbers(group="sizes", world=4) if e.cases[k].inputs[0].numel() == LARGE)
    sent = e.sent(number, 0)
    return [
        f"every rank has its left neighbour's tensor, on 1, 2, 3 and 4 ranks ({len(e.cases)} cases: shapes, dtypes)",
        f"no deadlock, from 0 to {LARGE} elements, and none when one rank is late",
        f"bytes: {sum(m.nbytes for m in sent)} for {LARGE} float32, {len(sent)} message"
        f"{'s' * (len(sent) > 1)} a rank, all of it to the right; the input is as it was",
    ]


SPEC = GroupSpec("02_messages", "shift", 5, cases, compare, MISTAKES, praise, "plain")
