"""When a rank was in `backward()`: a file of its own, so that the trace of a run can look through it."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from course_lib.launch import watch
from course_lib.parallel.intervals import Interval


@contextmanager
def watch_backward() -> Iterator[list[Interval]]:
    """Collect when `backward()` began and returned, in seconds of time.monotonic().

    Tensor.backward calls torch.autograd.backward. What DDP sends meanwhile comes from the line that called it.
    """
    found: list[Interval] = []
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        try:
            original(*args, **kwargs)
        finally:
            found.append((start, time.monotonic()))

    torch.autograd.backward = backward
    watch.passing.append(__file__)
    try:
        yield found
    finally:
        watch.passing.remove(__file__)
        torch.autograd.backward = original
