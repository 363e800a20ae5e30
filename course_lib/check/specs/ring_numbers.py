"""Mistakes of the ring that show in the numbers: the division for op="mean", and digits lost in another dtype."""

import math

import torch

from course_lib.check.findings import first_difference, tolerance
from course_lib.check.group import Evidence, GroupCase, Wrong


def _mean(case: GroupCase) -> bool:
    return case.options.get("op") == "mean"


def values_wrong(e: Evidence, number: int) -> bool:
    """Whether a rank of a complete case does not hold what it must."""
    case = e.cases[number]
    return any(
        a.after.shape != want.shape or first_difference(a.after, want, tolerance(case)) is not None
        for a, want in zip(e.answers[number], case.expected, strict=True)
    )


def _scaled(factor):
    """Whether the values of a wrong case are `factor(N)` times what is right, on all ranks."""

    def fits(e: Evidence, number: int) -> bool:
        case = e.cases[number]
        want = case.expected[0] * factor(case.world)
        return case.world > 1 and e.complete(number) and case.inputs[0].is_floating_point() and all(
            first_difference(a.after, want, tolerance(case)) is None for a in e.answers[number]
        )  # fmt: skip

    return fits


def forgets_average(e: Evidence, wrong: Wrong) -> str | None:
    if e.cases[wrong.case].options.get("op") == "mean" and _scaled(lambda n: n)(e, wrong.case):
        return (
            'In `tensor` is the sum. With op="mean", divide it once, at the end and in place: tensor /= world_size. '
            "(`tensor = tensor / world_size` makes a new tensor; the caller keeps the old one.)"
        )
    return None


def averages_twice(e: Evidence, wrong: Wrong) -> str | None:
    if e.cases[wrong.case].options.get("op") == "mean" and _scaled(lambda n: 1 / n)(e, wrong.case):
        return "That is the mean, divided by the number of ranks once more. Divide in one place only."
    return None


def averages_sums(e: Evidence, wrong: Wrong) -> str | None:
    if e.cases[wrong.case].options.get("op") != "mean" and _scaled(lambda n: 1 / n)(e, wrong.case):
        return 'That is the mean. Divide only when op is "mean"; the default is op="sum".'
    return None


def wrong_divisor(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    if not _mean(case) or not case.inputs[0].numel():
        return None
    total, got = case.expected[0] * case.world, e.answers[wrong.case][0].after.double()
    divisor = ((total * got).sum() / (got * got).sum()).item()  # least squares
    if not math.isfinite(divisor):
        return None
    divisor = round(divisor) if abs(divisor - round(divisor)) < 1e-3 else divisor
    if divisor in (0, case.world) or not _scaled(lambda n: n / divisor)(e, wrong.case):
        return None
    return (
        f"With {case.world} ranks the sum was divided by {divisor:.4g}. Divide by the number of ranks, whatever it "
        "is: dist.get_world_size()."
    )


def divides_each_step(e: Evidence, wrong: Wrong) -> str | None:
    """Every input is in the result, divided by a power of N, but not all by the same one."""
    case = e.cases[wrong.case]
    n = case.world
    if not _mean(case) or case.inputs[0].numel() < n * (n + 2):
        return None
    for chunk, (piece, *inputs) in enumerate(
        zip(*(t.double().tensor_split(n) for t in (e.answers[wrong.case][0].after, *case.inputs)), strict=True)
    ):
        columns = torch.stack(inputs, 1)
        shares = torch.linalg.lstsq(columns, piece[:, None]).solution[:, 0]
        if (columns @ shares - piece).abs().max() > 1e-4:
            return None
        by = [round(1 / share) if share > 1e-9 else 0 for share in shares.tolist()]
        powers = {n**k for k in range(1, n + 1)}
        close = all(b in powers and abs(share * b - 1) < 1e-2 for share, b in zip(shares.tolist(), by, strict=True))
        if not close:
            return None
        if len(set(by)) > 1:
            most, least = by.index(max(by)), by.index(min(by))
            return (
                f"In chunk {chunk} the numbers of rank {least} were divided by {by[least]}, and those of rank {most} "
                f"by {by[most]}: they were divided in several steps. Divide once, when the sum is finished."
            )
    return None


def wrong_mean(e: Evidence, wrong: Wrong) -> str | None:
    """Sums are right for every number of ranks, so only the division is left."""
    sums = [k for k in e.numbers() if not _mean(e.cases[k])]
    if not _mean(e.cases[wrong.case]) or any(values_wrong(e, k) for k in sums):
        return None
    if not {2, 3, 4} <= {e.cases[k].world for k in sums}:
        return None
    return (
        'With op="sum" all is right, so what goes wrong is the division: op="mean" is the sum, divided once by the '
        "number of ranks, as floats."
    )


def _within(e: Evidence, number: int, eps: float) -> bool:
    """The numbers of a case are right but for rounding to a dtype with this eps."""
    case = e.cases[number]
    room = case.world * eps * sum(tensor.double().abs() for tensor in case.inputs)
    pairs = zip(e.answers[number], case.expected, strict=True)
    return all(
        a.after.shape == want.shape and bool(((a.after.double() - want.double()).abs() <= room).all())
        for a, want in pairs
    )


def loses_precision(e: Evidence, wrong: Wrong) -> str | None:
    """A float64 (or float32) result that has only the digits of a smaller dtype."""
    case = e.cases[wrong.case]
    dtype = case.inputs[0].dtype
    smaller = {torch.float64: (torch.float32, torch.float16), torch.float32: (torch.float16,)}.get(dtype, ())
    found = next((kind for kind in smaller if _within(e, wrong.case, torch.finfo(kind).eps)), None)
    if found is None or not case.inputs[0].numel():
        return None
    if case.traced:  # there a missing rank may look like rounding: only if other sums on so many ranks are right
        others = [k for k in e.numbers(world=case.world) if not _mean(e.cases[k]) and _is(e, k, torch.float32)]
        if not others or any(values_wrong(e, k) for k in others):
            return None
    name, digits = str(found).removeprefix("torch."), {torch.float32: 7, torch.float16: 3}[found]
    return (
        f"These numbers are right to about {digits} digits, as {name} has them, but the tensor is "
        f"{str(dtype).removeprefix('torch.')}: somewhere they pass through {name}. torch.zeros(n) and torch.empty(n) "
        "make float32; with dtype=tensor.dtype, or as torch.zeros_like(...), a buffer keeps all digits."
    )


def _is(e: Evidence, number: int, dtype: torch.dtype) -> bool:
    return e.cases[number].inputs[0].dtype == dtype


def loses_integers(e: Evidence, wrong: Wrong) -> str | None:
    if not _is(e, wrong.case, torch.int64) or not _within(e, wrong.case, torch.finfo(torch.float32).eps):
        return None
    return (
        "Floats were right, large int64 numbers are not, and only in their last digits: somewhere they pass through a "
        "float, which has too few. Buffers take the dtype of the tensor (torch.empty_like), and `/` makes floats."
    )
