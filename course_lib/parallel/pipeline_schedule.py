"""Pipeline schedules as data: what each stage does, in which order; when, and how much it must keep.

A stage is some layers in a row on one rank, a microbatch some samples of the batch. GPipe does all forwards, then all
backwards (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
section 2.2, figure 2). 1F1B begins backwards as soon as it can (Narayanan et al., "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019, section 3.2; with a flush after each batch, as here: Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2.1).
"""

from collections.abc import Sequence
from typing import NamedTuple


class Op(NamedTuple):
    """kind "forward" or "backward", of a microbatch counted from 0."""

    kind: str
    microbatch: int


class Span(NamedTuple):
    """An op on a stage, from `start` to `end`."""

    stage: int
    op: Op
    start: float
    end: float


def gpipe(stages: int, microbatches: int) -> list[list[Op]]:
    """For each stage its ops: all forwards, then all backwards, the last microbatch first."""
    _check(stages, microbatches)
    there = [Op("forward", m) for m in range(microbatches)]
    back = [Op("backward", m) for m in reversed(range(microbatches))]
    return [there + back for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Op]]:
    """For each stage its ops: a forward for each stage behind it, then one forward, one backward in turn."""
    _check(stages, microbatches)
    found = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        ops = [Op("forward", m) for m in range(ahead)]
        for m in range(microbatches):
            if m + ahead < microbatches:
                ops.append(Op("forward", m + ahead))
            ops.append(Op("backward", m))
        found.append(ops)
    return found


def _check(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise ValueError(f"A pipeline has at least 1 stage and 1 microbatch, not {stages} and {microbatches}.")


def bubble(stages: int, microbatches: int) -> float:
    """Predicted part of the time in which a stage waits, in both schedules, when all stages take equally long.

    (P - 1) / (M + P - 1) (GPipe, section 2.3). Narayanan et al. 2021 divide the same waiting by the time of the work
    instead: (P - 1) / M.
    """
    _check(stages, microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def peak_stored(ops: Sequence[Op]) -> int:
    """Of how many microbatches a stage must keep the activations at once: those gone forward and not yet back."""
    stored = peak = 0
    for op in ops:
        stored += 1 if op.kind == "forward" else -1
        peak = max(peak, stored)
    return peak


def timeline(schedule: Sequence[Sequence[Op]], forward: float = 1.0, backward: float = 2.0) -> list[Span]:
    """When each op runs if a forward and a backward take so long on every stage, and sending takes no time.

    schedule   for each stage its ops

    An op starts when its stage is free and the stage before it (forward) or behind it (backward) has done the same
    microbatch. Spans are ordered by start. A ValueError if stages wait for each other for ever.
    """
    ends: dict[tuple[int, Op], float] = {}
    free, place, spans = [0.0] * len(schedule), [0] * len(schedule), []
    while any(place[s] < len(ops) for s, ops in enumerate(schedule)):
        before = len(spans)
        for stage, ops in enumerate(schedule):
            while place[stage] < len(ops) and all(n in ends for n in _needs(stage, ops[place[stage]], len(schedule))):
                op = ops[place[stage]]
                start = max([free[stage], *(ends[n] for n in _needs(stage, op, len(schedule)))])
                free[stage] = ends[stage, op] = start + (forward if op.kind == "forward" else backward)
                spans.append(Span(stage, op, start, free[stage]))
                place[stage] += 1
        if len(spans) == before:
            raise ValueError(f"{_waiting(schedule, place)}: no stage can go on.")
    return sorted(spans, key=lambda span: (span.start, span.stage))


def _needs(stage: int, op: Op, stages: int) -> list[tuple[int, Op]]:
    """What must be done before: (stage, op)."""
    if op.kind == "forward":
        return [(stage - 1, op)] if stage else []
    return [(stage, Op("forward", op.microbatch)), *([(stage + 1, op)] if stage + 1 < stages else [])]


def _waiting(schedule: Sequence[Sequence[Op]], place: Sequence[int]) -> str:
    stuck = [(s, ops[place[s]]) for s, ops in enumerate(schedule) if place[s] < len(ops)]
    return ", ".join(f"stage {s} waits for its {op.kind} of microbatch {op.microbatch}" for s, op in stuck).capitalize()


def idle(spans: Sequence[Span]) -> float:
    """Part of the stages' time in which they wait, from the first start to the last end: the bubble of a timeline."""
    stages = len({span.stage for span in spans})
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(span.end - span.start for span in spans) / (stages * whole)
