"""Exercise 07, second part: a comm hook of one bit an element. Judged: averages after each step, bits, bytes."""

import random
from collections.abc import Callable

import torch

from course_lib.check.findings import destroyed, ended_badly, told_apart
from course_lib.check.group import Evidence, GroupCase, GroupMistake, GroupSpec, Wrong
from course_lib.check.specs import torch_ddp_onebit_mistakes as mistakes
from course_lib.check.specs.torch_ddp_drive import drive_hook
from course_lib.check.specs.torch_ddp_onebit_oracle import RIGHT, fits, fitting, found, off, simulate
from course_lib.launch import Message

STEPS = 4
PATIENCE = 4.0  # seconds; half of it only a hook takes that waits for others
OURS = "torch_ddp_drive.py, "  # where DDP itself sends
LATER = [2, 1, 3, 0]  # another order of use than that of the parameters
SLACK = 24  # bytes for each bucket, above its bits: a scale, and what rounding up may cost


def _case(group: str, world: int, lengths: list[int], note: str, generator: torch.Generator, **more) -> GroupCase:
    rows = (STEPS, sum(lengths))
    inputs = tuple(torch.randn(rows, generator=generator, dtype=torch.float64) for _ in range(world))
    for rank, gradients in enumerate(inputs):
        gradients[0, rank] = 0  # the rule says >= 0
    options = {"lengths": lengths, "order": [2, 0, 3, 1], "settled": False, "bucket_bytes": 2**30} | more
    story = f"{world} ranks, {sum(lengths)} gradients in {note}"
    return GroupCase(group, story, inputs, (torch.zeros(0),) * world, options, drive=drive_hook)


def cases(rng: random.Random) -> list[GroupCase]:
    """Two buckets of equal length; one whose order changes after the first backward; odd lengths, and a late rank."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    a, b = rng.randint(5, 8), rng.randint(9, 12)
    odd = [rng.randint(2, 5), rng.randint(20, 30), rng.randint(11, 19), rng.randint(6, 10)]
    alike = [odd[0], *[odd[2]] * 3]
    late = {"patient": rng.randrange(2), "patience": PATIENCE}
    return [
        # Gradients arrive in the order 1, 3, 0, 2. A bucket is closed when it holds at least so many bytes.
        _case(
            "two", 3, [a, a, b, b], f"2 buckets, `state` is emptied before step {STEPS - 1}", generator,
            settled=True, bucket_bytes=8 * (a + 1), emptied=STEPS - 1,
        ),
        # Here they arrive as 0, 3, 1, 2, and DDP begins with 0, 1, 2, 3: a key must be more than the first parameter,
        # or the lengths of all.
        _case("one", 3, alike, "1 bucket, the hook registered before the first backward", generator, order=LATER),
        _case("odd", 2, odd, "buckets of odd length", generator, bucket_bytes=8 * 12, **late),
    ]  # fmt: skip


def values(e: Evidence) -> Wrong | None:
    """The first step whose averages are not what one bit, with what was left over, gives."""
    for number in e.numbers():
        case, got = e.cases[number], found(e, number)
        if any(fits(e, number, rule, got) for rule in RIGHT):
            continue
        leading = {rule: fitting(e, number, rule, got) for rule in RIGHT}
        rule = max(leading, key=leading.get)
        step, want = leading[rule], simulate(e, number, rule)
        rank, at = off(got[:, step], want[:, step]).nonzero()[0].tolist()
        is_, right = told_apart(got[rank, step, at].item(), want[rank, step, at].item())
        layout = e.answers[number][0].facts["layouts"][step]
        text = (
            f"{case.story}: step {step}, rank {rank}: element {at} of all gradients was averaged to {is_}, and should "
            f"be {right} (the parameters in the buckets of this step: {layout})."
        )
        return Wrong("values", text, number)
    return None


def bits(e: Evidence) -> Wrong | None:
    """All ranks must end with the same bits, or models drift apart."""
    for number in e.numbers():
        got = found(e, number)
        if (got != got[:1]).any():
            step = int((got != got[:1]).nonzero()[0][1])
            return Wrong("bits", f"{e.cases[number].story}: step {step}: ranks do not have the same bits.", number)
    return None


def allowed(e: Evidence, number: int) -> int:
    """Bytes that a rank may put into collectives: for each bucket its bits, and SLACK."""
    lengths = e.cases[number].options["lengths"]
    sizes = [sum(lengths[p] for p in bucket) for step in e.answers[number][0].facts["layouts"] for bucket in step]
    return sum(-(-size // 8) + SLACK for size in sizes)


def sent(e: Evidence, number: int, rank: int) -> int:
    """Bytes that a rank put into collectives and messages, without what DDP itself sends at its start."""
    calls = [m for m in e.messages[number] if m.rank == rank and m.op != "barrier" and not _of_ddp(m)]
    own = 8 * sum(e.cases[number].options["lengths"]) if e.cases[number].options["settled"] else 0
    put_in = [m.nbytes for m in calls if "recv" not in m.op and not ("broadcast" in m.op and m.peer != rank)]
    return sum(put_in) - own - calls[0].nbytes


def _of_ddp(m: Message) -> bool:
    """With a broadcast DDP makes weights and the plan of its buckets equal."""
    return m.op == "broadcast" and m.where.startswith(OURS)


def traffic(e: Evidence) -> Wrong | None:
    """One bit an element, and a scale."""
    for number in e.numbers():
        for rank in range(e.cases[number].world):
            got, least = sent(e, number, rank), allowed(e, number)
            if got > least:
                plain = STEPS * 8 * sum(e.cases[number].options["lengths"])
                text = (
                    f"{e.cases[number].story}: in {STEPS} steps rank {rank} put {got} bytes into collectives; all "
                    f"gradients have {plain}, and one bit an element with a scale for each bucket takes at most "
                    f"{least}."
                )
                return Wrong("traffic", text, number)
    return None


def unasked(e: Evidence) -> Wrong | None:
    """What is in a tensor before its collective has ended is luck."""
    for number in e.numbers():
        for m in e.messages[number]:
            if m.end is None and not m.where.startswith(OURS):
                text = (
                    f"{e.cases[number].story}: rank {m.rank} starts {m.op} ({m.where}), and nothing waits for its end."
                )
                return Wrong("handles", text, number)
    return None


def late(e: Evidence) -> Wrong | None:
    """A hook that returns only when another rank has begun its backward waits for it, and holds up its own."""
    for number in e.numbers():
        case, answers = e.cases[number], e.answers[number]
        patient = case.options.get("patient")
        if patient is None:
            continue
        for step, began in enumerate(answers[patient].facts["began"]):
            held = [(rank, *h) for rank, a in enumerate(answers) if rank != patient for h in a.facts["hooks"][step]]
            for rank, start, end in held:
                if start + case.options["patience"] / 2 < began < end:
                    text = (
                        f"{case.story}: in step {step} rank {patient} began its backward {began - start:.1f} s "
                        f"later than rank {rank}, whose hook returned only then"
                    )
                    return Wrong("overlap", f"{text}{_called(e, number, rank, start, began)}.", number)
    return None


def _called(e: Evidence, number: int, rank: int, start: float, began: float) -> str:
    """Which call it waited for: the last in the hook before that moment."""
    calls = [m for m in e.messages[number] if m.rank == rank and start <= m.start + e.zero[number] < began]
    return f": it waits for the end of {calls[-1].op} ({calls[-1].where})" if calls else ""


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, unasked, values, bits, traffic, late, ended_badly):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    number = e.numbers(group="one")[0]
    plain = STEPS * 8 * sum(e.cases[number].options["lengths"])
    return [
        f"averages as one bit with error feedback gives them, in each of {STEPS} steps, to 10 digits ({len(e.cases)} "
        "cases, 2 and 3 ranks, one bucket and more, buckets that change after the first backward)",
        "all ranks have the same bits, what is left over is in `state`, and no hook waits for another rank",
        f"bytes: each of 3 ranks sent {sent(e, number, 0)} where the gradients have {plain}",
    ]


def _named(functions: tuple[Callable, ...], *kinds: str) -> tuple[GroupMistake, ...]:
    return tuple(GroupMistake(f.__name__, f, kinds) for f in functions)


MISTAKES = (
    *_named(mistakes.OF_HANDLES, "handles"),
    *_named(mistakes.OF_VALUES, "values"),
    *_named(mistakes.OF_BITS, "bits"),
    *_named(mistakes.OF_TRAFFIC, "traffic"),
    *_named(mistakes.OF_OVERLAP, "overlap"),
    *_named(mistakes.OF_ERRORS, "raised"),
    *_named(mistakes.OF_HANGS, "hangs", "ended"),
)
SPEC = GroupSpec("07_torch_ddp", "onebit_hook", 7, cases, compare, MISTAKES, praise, "one")
