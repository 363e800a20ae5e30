"""The traces that the training loop writes, RUN/traces/rank_K.json, as a short list of spans: `read_spans(folder)`.

A trace holds thousands of operators. What is left of them here is what a step consists of: each loading of a batch,
each forward, each backward, each step of the optimizer, each communication. Times are those of the CPU; with a GPU they
say when work was put on its queue.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Spans = list[tuple[int, str, int, int]]

# The marks that torch leaves. tests/parallel/test_traces.py tells when one of them changes.
_MARKS = {
    "data": re.compile(r"enumerate\(DataLoader\)#\w+\.__next__"),
    "forward": re.compile(r"DistributedDataParallel\.forward"),
    "optimizer": re.compile(r"Optimizer\.step#.*"),
    "communication": re.compile(r"(gloo|nccl|mpi):\w+"),
}
_NODE = "autograd::engine::evaluate_function: "


def read_spans(folder: Path | str) -> Spans:
    """(rank, kind, start, end) of all ranks, in whole microseconds, each rank's in order of their starts.

    folder  a run folder, of a run with --measure.profile_at

    Raises FileNotFoundError when it has no traces, ValueError for a file that is no trace.
    """
    paths = sorted(Path(folder, "traces").glob("rank_*.json"), key=lambda path: int(path.stem.removeprefix("rank_")))
    if not paths:
        raise FileNotFoundError(f"{folder} has no traces: train with --measure.profile_at STEP.")
    return [span for path in paths for span in spans_of(int(path.stem.removeprefix("rank_")), path.read_bytes())]


def without_waiting(spans: Spans) -> Spans:
    """The same without the time in which a rank waits in a communication until the last rank has come, too.

    The n-th communication of each rank, counted from the end, is the same collective. What is left of one that a rank
    came to first begins when the last rank came.
    """
    calls: dict[int, list[tuple[int, int]]] = {rank: [] for rank, *_ in spans}
    for rank, kind, start, end in sorted(spans, key=lambda span: span[2], reverse=True):
        if kind == "communication":
            calls[rank].append((start, end))
    kept = [span for span in spans if span[1] != "communication"]
    for meeting in zip(*calls.values(), strict=False):
        last = max(start for start, _ in meeting)
        kept += [
            (rank, "communication", last, end) for rank, (_, end) in zip(calls, meeting, strict=True) if end > last
        ]
    return sorted(kept, key=lambda span: (span[0], *span[2:]))


def spans_of(rank: int, content: bytes | str) -> Spans:
    """The spans of one rank's trace. Raises ValueError for what is no trace of training."""
    try:
        events = [_event(event) for event in json.loads(content)["traceEvents"] if event.get("ph") == "X"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"The file of rank {rank} is no trace of torch's profiler.") from None
    found = [
        (rank, kind, start, end)
        for kind, mark in _MARKS.items()
        for name, start, end in events
        if mark.fullmatch(name) and end > start
    ]
    ends = [start for _, kind, start, _ in found if kind in ("forward", "optimizer", "data")]
    nodes = [(start, end) for name, start, end in events if name.startswith(_NODE)]
    found += [(rank, "backward", start, end) for start, end in _backwards(nodes, ends)]
    if not {"forward", "backward", "optimizer"} <= {kind for _, kind, *_ in found}:
        raise ValueError(f"The trace of rank {rank} has no whole step: forward, backward and optimizer.")
    return sorted(found, key=lambda span: span[2:])


def _event(event: dict[str, Any]) -> tuple[str, int, int]:
    start, length = float(event["ts"]), float(event["dur"])
    return str(event["name"]), round(start), round(start + length)


def _backwards(nodes: Iterable[tuple[int, int]], cuts: list[int]) -> list[tuple[int, int]]:
    """From the first to the last node of autograd between two of the other marks: one span for each backward."""
    cuts = sorted(cuts)
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in nodes:
        groups.setdefault(bisect_right(cuts, start), []).append((start, end))
    return [(min(s for s, _ in group), max(e for _, e in group)) for group in groups.values()]
