"""Exercise 07: what a hook of one bit an element gives, step by step, and what it gives with a usual mistake in it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from course_lib.check.group import Evidence


@dataclass(frozen=True)
class Rule:
    """One way to write the hook.

    residual  where what was not sent is kept: "parameters" (dropped when a bucket's parameters change), "elements"
              (it follows its elements), "index" of the bucket, "single" (one for all), "none", "alias" (not a copy of
              the bucket's buffer but the buffer, which holds the new gradient by the next step)
    keep      what is kept: "unsent", "wanted", "gradient" (without what was left before), "average" (of all ranks),
              "negative" (sent - wanted), "sent"
    memory    where that is: in "state", which may be emptied from outside, or "elsewhere"
    sign      of 0: "plus", "minus", or "nothing"
    scale     "mean" of absolute values, that of each "parameter", their "max", the "norm", their root mean square
              "rms", or the mean of the "gradient"
    combine   "mean", "sum", "twice" divided, majority "vote", "own" scale for the signs of all, "local" (no exchange)
    """

    residual: str = "parameters"
    keep: str = "unsent"
    memory: str = "state"
    sign: str = "plus"
    scale: str = "mean"
    combine: str = "mean"


RIGHT = (Rule(), Rule(residual="elements"))


def found(e: Evidence, number: int) -> torch.Tensor:
    """The averaged gradients that the ranks had: (ranks, steps, elements)."""
    steps = range(len(e.cases[number].inputs[0]))
    return torch.stack([torch.stack([a.tensors[f"grad {step}"] for step in steps]) for a in e.answers[number]])


def off(got: torch.Tensor, want: torch.Tensor, digits: float = 1e-10) -> torch.Tensor:
    """Which elements are not equal to 10 digits of the largest."""
    return ~((got - want).abs() <= digits * max(1e-3, want.abs().max()))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To 10 digits of the largest."""
    return not off(got, want).any()


def simulate(e: Evidence, number: int, rule: Rule) -> torch.Tensor:
    """What all ranks have after each step: (ranks, steps, elements)."""
    return torch.stack([*steps(e, number, rule)], dim=1)


def fitting(e: Evidence, number: int, rule: Rule, got: torch.Tensor, digits: float = 1e-10) -> int:
    """In how many steps, from the first on, this is what the rule gives."""
    for step, want in enumerate(steps(e, number, rule)):
        if off(got[:, step], want, digits).any():
            return step
    return got.shape[1]


def fits(e: Evidence, number: int, rule: Rule, got: torch.Tensor, digits: float = 1e-10) -> bool:
    """It is what the rule gives in all steps."""
    return fitting(e, number, rule, got, digits) == got.shape[1]


def steps(e: Evidence, number: int, rule: Rule) -> Iterator[torch.Tensor]:
    """Step by step what all ranks have: (ranks, elements)."""
    case = e.cases[number]
    ends = torch.tensor(case.options["lengths"]).cumsum(0).tolist()
    starts = [0, *ends]
    kept: list[dict] = [{} for _ in case.inputs]
    for step, layout in enumerate(e.answers[number][0].facts["layouts"]):
        result = torch.full((case.world, ends[-1]), torch.nan, dtype=torch.float64)
        if step == case.options.get("emptied") and rule.memory == "state":
            kept = [{} for _ in case.inputs]
        for index, bucket in enumerate(layout):
            places = torch.cat([torch.arange(starts[p], ends[p]) for p in bucket])
            key = {"index": index, "single": 0, "elements": "all"}.get(rule.residual, tuple(bucket))
            lengths = [ends[p] - starts[p] for p in bucket]
            averaged = _bucket(rule, [g[step][places] for g in case.inputs], kept, key, places, lengths)
            for rank, values in enumerate(averaged):
                result[rank, places] = values
        yield result


def _bucket(
    rule: Rule,
    gradients: list[torch.Tensor],
    kept: list[dict],
    key: object,
    places: torch.Tensor,
    lengths: list[int],
) -> list[torch.Tensor]:
    """One bucket in one step; changes what is kept."""
    wanted = [g + _left(rule, memory, key, places, g) for g, memory in zip(gradients, kept, strict=True)]
    scales = [_scale(rule, w, g, lengths) for w, g in zip(wanted, gradients, strict=True)]
    of_zero = {"plus": 1.0, "minus": -1.0, "nothing": 0.0}[rule.sign]
    signs = [torch.where(w == 0, of_zero, w.sign()) for w in wanted]
    sent = [scale * sign for scale, sign in zip(scales, signs, strict=True)]
    averaged = _combine(rule, sent, signs, scales)
    for rank, memory in enumerate(kept):
        memory[key] = {
            "unsent": wanted[rank] - sent[rank],
            "wanted": wanted[rank],
            "gradient": gradients[rank] - sent[rank],
            "average": wanted[rank] - averaged[rank],
            "negative": sent[rank] - wanted[rank],
            "sent": sent[rank],
        }[rule.keep]
        if rule.residual == "elements":
            memory.setdefault("by element", {}).update(zip(places.tolist(), memory[key].tolist(), strict=True))
    return averaged


def _left(rule: Rule, memory: dict, key: object, places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What was not sent before, of this bucket."""
    if rule.residual == "elements":
        old = memory.get("by element", {})
        return torch.tensor([old.get(place, 0.0) for place in places.tolist()], dtype=torch.float64)
    old = memory.get(key)
    if rule.residual == "alias" and old is not None:
        return like
    return torch.zeros_like(like) if rule.residual == "none" or old is None or old.shape != like.shape else old


def _scale(rule: Rule, wanted: torch.Tensor, gradient: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return {
        "mean": wanted.abs().mean(),
        "parameter": torch.cat([part.abs().mean().expand(len(part)) for part in wanted.split(lengths)]),
        "max": wanted.abs().max(),
        "norm": wanted.norm(),
        "rms": wanted.square().mean().sqrt(),
        "gradient": gradient.abs().mean(),
    }[rule.scale]


def _combine(
    rule: Rule, sent: list[torch.Tensor], signs: list[torch.Tensor], scales: list[torch.Tensor]
) -> list[torch.Tensor]:
    world = len(sent)
    if rule.combine == "own":
        return [scale * sum(signs) / world for scale in scales]
    if rule.combine == "local":
        return sent
    if rule.combine == "vote":
        votes = sum(signs)
        return [torch.where(votes >= 0, 1.0, -1.0).double() * sum(scales) / world] * world
    return [sum(sent) / world ** {"mean": 1, "sum": 0, "twice": 2}[rule.combine]] * world


def exact(e: Evidence, number: int) -> torch.Tensor:
    """The plain averages of the gradients, for all ranks: what DDP gives without a hook."""
    inputs = e.cases[number].inputs
    return (sum(inputs) / len(inputs)).expand(len(inputs), -1, -1)


def variants(**changed: str) -> list[Rule]:
    """Both right rules with one thing changed."""
    return [replace(rule, **changed) for rule in RIGHT]
