"""Run training steps under torch.profiler on every rank: `run(profiled(train_steps), ranks=2)`.

What comes back is small, plain data, from which `show.timeline` draws and `show.overlap` computes.
"""

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib.collectives import communicator
from course_lib.parallel import phases
from course_lib.parallel.backward_calls import watch_backward
from course_lib.parallel.intervals import Interval, union
from course_lib.parallel.phases import Raw, Span

_MARK = "ring-to-ddp clock"
_turns = itertools.count()


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of a course_lib Communicator: it leaves no trace in torch."""

    op: str
    nbytes: int  # that this rank puts in
    start: float
    end: float
    computing: bool  # on the thread that computes, which it keeps busy


@dataclass(frozen=True, slots=True)
class Profile:
    """What one rank did. Times are seconds of time.monotonic(), one clock for all processes of a machine."""

    rank: int
    turn: int  # how many profiles this rank had made before in the run
    begin: float  # all ranks had met, the function began
    end: float
    steps: list[Interval]  # each ends with optimizer.step()
    compute: list[Span] = field(repr=False)  # kind: "forward", "backward", "optimizer" or "other"
    communication: list[Span] = field(repr=False)  # kind: "all_reduce", ...; what torch's backend ran
    calls: list[Call] = field(repr=False)
    backwards: list[Interval] = field(repr=False)  # when the rank was in backward(), computing or waiting
    gpu: bool  # spans are those of a GPU's kernels
    value: Any  # what the function returned


def profiled(fn: Callable) -> Callable[..., Profile]:
    """Wrap the training function `fn` for `run(profiled(fn), ranks=N)`; its value becomes `Profile.value`.

    A few steps are enough, after one or two that warm up: the profiler keeps a record of every operator.
    """
    if not callable(fn):
        raise TypeError(f"profiled wraps a function that trains, not {type(fn).__name__}: profiled(train_steps).")

    @functools.wraps(fn)
    def run_profiled(*args: Any, **kwargs: Any) -> Profile:
        return _profile(fn, args, kwargs)

    return run_profiled


def _profile(fn: Callable, args: tuple, kwargs: dict) -> Profile:
    """In the rank. No part of the wrapper, which is shipped by value: a copy of `listeners` would hear nothing."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints lines that help nobody here
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as recorded:
        brackets = [_mark() for _ in range(7)]
        turn = next(_turns)
        dist.barrier()  # show.timeline finds this call among the run's messages, and so their zero
        begin = time.monotonic()
        with watch_backward() as backwards, _calls() as calls:
            value = fn(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.monotonic()
    raw = _raw(recorded, brackets)
    raw = [event for event in raw if event.start >= begin]
    taken = [(call.start, call.end) for call in calls if call.computing]
    return Profile(
        rank=dist.get_rank(), turn=turn, begin=begin, end=end,
        steps=phases.steps(raw, begin, end), compute=phases.compute(raw, union(backwards), taken),
        communication=phases.communication(raw, backwards), calls=calls, backwards=backwards,
        gpu=any(event.device for event in raw), value=value,
    )  # fmt: skip


def _mark() -> Interval:
    """Leave an event in the profile; returns the moments before and after, of our own clock."""
    before = time.monotonic()
    with record_function(_MARK):
        pass
    return before, time.monotonic()


def _raw(recorded: profile, brackets: list[Interval]) -> list[Raw]:
    """The profiler's events on the clock of time.monotonic(): shifted as the narrowest bracket of a mark says."""
    events = list(recorded.profiler.kineto_results.events())
    marks = sorted((event.start_ns(), event.duration_ns()) for event in events if event.name() == _MARK)
    (before, after), (start, length) = min(zip(brackets, marks, strict=True), key=lambda pair: pair[0][1] - pair[0][0])
    origin = start + length // 2  # subtracted as integers: float64 holds seconds since 1970 to 0.2 µs only
    shift = (before + after) / 2

    def seconds(ns: int) -> float:
        return (ns - origin) * 1e-9 + shift

    return [
        Raw(
            event.name(), seconds(event.start_ns()), seconds(event.start_ns() + event.duration_ns()), event.scope(),
            event.start_thread_id(), event.device_type() != torch.autograd.DeviceType.CPU,
            event.correlation_id(), event.linked_correlation_id(),
        )
        for event in events
    ]  # fmt: skip


@contextmanager
def _calls() -> Iterator[list[Call]]:
    """Collect the calls of Communicators, on whatever thread."""
    found: list[Call] = []
    computing = threading.get_ident()

    def listener(op: str, nbytes: int, start: float, end: float) -> None:
        found.append(Call(op, nbytes, start, end, threading.get_ident() == computing))

    communicator.listeners.append(listener)
    try:
        yield found
    finally:
        communicator.listeners.remove(listener)
