"""Exercise 03: the ring all-reduce, on real ranks. Judged: values, bits, bytes, peers, and that nothing is a race."""

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
    tolerance,
)
from course_lib.check.group import Evidence, GroupCase, GroupSpec, Wrong
from course_lib.check.specs import ring_trace
from course_lib.check.specs.ring_mistakes import MISTAKES

WORLDS = (4, 3, 2, 1)
EVEN = 240  # divisible by 2, 3, 4, 5, 6, 8 ...: every way of cutting it into equal parts sends the same bytes


def _case(group: str, inputs: list[torch.Tensor], op: str | None, **more) -> GroupCase:
    world = len(inputs)
    total = sum(tensor.long() if not tensor.is_floating_point() else tensor.double() for tensor in inputs)
    want = total / world if op == "mean" else total
    said = f", op='{op}'" if op else ""
    story = f"{world} rank{'s' * (world > 1)}, {shape_text(inputs[0])}{said}"
    return GroupCase(group, story, tuple(inputs), (want,) * world, {"op": op} if op else {}, **more)


def cases(rng: random.Random) -> list[GroupCase]:
    """Fresh numbers and lengths each time; for each number of ranks the same kinds of cases."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))

    def floats(world: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]

    def integers(world: int, length: int) -> list[torch.Tensor]:
        return [torch.randint(-(2**60), 2**60, (length,), generator=generator) for _ in range(world)]

    found = []
    for n in WORLDS:
        even, odd = EVEN * rng.randint(1, 2), n * rng.randint(20, 60) + rng.randint(1, max(1, n - 1))
        found.append(_case("even", floats(n, even, torch.float32), None))
        if n > 1:
            found.append(_case("traced", list(ring_trace.digits(n)), "sum", traced=True, late=rng.randrange(n)))
        found.append(_case("mean", floats(n, odd, torch.float32), "mean"))
        short = {4: (0, 3), 3: (2,), 2: (1,), 1: (0,)}[n]
        found += [_case("short", floats(n, length, torch.float32), "sum") for length in short]
        if n == 4:
            found.append(_case("dtypes", integers(n, odd), "sum"))
    mean = _case("mean", floats(4, EVEN, torch.float64), "mean")
    return [
        *found[:2],
        mean,
        _case("dtypes", floats(4, 99, torch.bfloat16), "sum"),
        *found[2:],
    ]  # what tells most comes first


def values(e: Evidence) -> Wrong | None:
    """The first case in which a rank's tensor does not hold what it must."""
    for number in e.numbers():
        case = e.cases[number]
        allowed = tolerance(case)
        for rank, answer in enumerate(e.answers[number]):
            want = case.expected[rank]
            if answer.after.shape != want.shape or answer.after.dtype != case.inputs[rank].dtype:
                text = f"{case.story}: the tensor of rank {rank} is now {shape_text(answer.after)}."
                return Wrong("values", text, number)
            at = first_difference(answer.after, want, allowed)
            if at is not None:
                got, right = told_apart(answer.after.flatten()[at].item(), want.flatten()[at].item())
                text = f"{case.story}: on rank {rank}, element {at} must be {right}, and is {got}."
                return Wrong("values", text, number, ring_trace.first_wrong(e))
    return None


def bits(e: Evidence) -> Wrong | None:
    """All ranks must end with the same bits, or models drift apart."""
    for number in e.numbers():
        first, *others = [answer.after for answer in e.answers[number]]
        for rank, other in enumerate(others, 1):
            different = first.flatten().view(torch.uint8) != other.flatten().view(torch.uint8) if len(first) else None
            if different is not None and different.any():
                at = int(different.nonzero()[0]) // first.element_size()
                return Wrong(
                    "bits",
                    f"{e.cases[number].story}: ranks 0 and {rank} do not end with the same bits; element {at} is "
                    f"{first.flatten()[at].item()!r} and {other.flatten()[at].item()!r}.",
                    number,
                )
    return None


def peers(e: Evidence) -> Wrong | None:
    """Each rank talks with its two neighbours only."""
    for number in e.numbers():
        n = e.cases[number].world
        for m in e.messages[number]:
            if m.peer is not None and (m.peer - m.rank) % n not in (1, n - 1):
                verb = "sends to" if "send" in m.op else "receives from"
                text = f"{e.cases[number].story}: rank {m.rank} {verb} rank {m.peer} ({m.where})."
                return Wrong("peers", text, number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """Bytes: exactly 2(N-1)/N of the tensor where N divides it; otherwise the longest chunk for each, at most."""
    for number in e.numbers():
        case = e.cases[number]
        n, numel, size = case.world, case.inputs[0].numel(), case.inputs[0].element_size()
        for rank in range(n):
            sent = sum(m.nbytes for m in e.sent(number, rank))
            exact = 2 * (n - 1) * numel * size // n
            if (case.group in ("even", "mean") and numel % EVEN == 0 and sent != exact) or (
                sent > 2 * (n - 1) * (-(-numel // n) + 1) * size
            ):
                return Wrong(
                    "traffic",
                    f"{case.story}: rank {rank} sent {sent} bytes in {len(e.sent(number, rank))} messages; the ring "
                    f"needs 2(N-1)/N of the tensor, {exact} bytes.",
                    number,
                )
    return None


def small_messages(e: Evidence) -> Wrong | None:
    """Cut finer than chunks is fine (a pipeline), but not element by element."""
    for number in e.numbers(group="even"):
        for rank in range(e.cases[number].world):
            sends = e.sent(number, rank)
            if sends and sum(m.nbytes for m in sends) < 4 * e.cases[number].inputs[0].element_size() * len(sends):
                return Wrong("small", f"{e.cases[number].story}: rank {rank} sent {len(sends)} messages.", number)
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (ready_made, destroyed, values, handles, ended_badly, bits, peers, traffic, small_messages):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    number = e.numbers(group="even", world=4)[0]
    case, sends = e.cases[number], e.sent(number, 0)
    total, sent = case.inputs[0].numel() * 4, sum(m.nbytes for m in sends)
    lengths = [case.inputs[0].numel() for case in e.cases]
    return [
        f"right on 1, 2, 3 and 4 ranks: sum and mean, {min(lengths)} to {max(lengths)} numbers, float32, float64, "
        f"bfloat16, int64 ({len(e.cases)} cases)",
        "all ranks end with the same bits",
        f"bytes: each of 4 ranks sent {sent} = 2·3/4 · {total}, that is 2(N-1)/N·M, in {len(sends)} messages",
        "peers: the two neighbours only; every handle was waited for before its tensor was touched",
    ]


SPEC = GroupSpec("03_ring_all_reduce", "ring_all_reduce", 10, cases, compare, MISTAKES, praise, "even")
