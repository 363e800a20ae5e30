"""Who is slow, and what does communication cost? A rank's time before it waits for anybody, and its time of waiting.

A collective lasts as long on each rank as on the slowest, so the time of a whole step is the same on all and accuses
nobody. What differs is the time before: waiting for data, forward, and backward up to its last gradient.
"""

import time
from statistics import median
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

TIMES, LEAST = 1.5, 0.002  # slow: so many times the others' time, and at least so many seconds more
IN_A_ROW = 20  # steps; one slow step is chance


class Pace:
    """Measures each forward and backward of a DDP model in two parts.

    own      forward, and backward up to the last gradient: without what DDP waits for, buffers before and all-reduces
             after
    exposed  from there to the end of backward: nothing is left to do but wait for all-reduces and put their results
             into the gradients. What of the communication went on before is hidden behind backward, and costs no time

    DDP has clocks, too, which agree with these; but it looks at them in its first ten steps and then in each hundredth.
    These see every step, so a row has the sum of its own steps. A comm hook that waits by itself, where it could return
    a Future, is no waiting that DDP knows of: its time is `own`.

    On a GPU with its own events, which wait for nothing until `seconds` asks.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device) -> None:
        self.device = device
        self.began = self.computed = None  # of the newest forward; seconds, or an event of a GPU
        self.spans: list[tuple[Any, Any, Any]] = []
        # Inside of DDP's forward, after it has sent buffers. Private: tests/train/test_watching.py tells of a change.
        self.forward = model._run_ddp_forward
        model._run_ddp_forward = self._timed

    def _timed(self, *inputs: Any, **options: Any) -> Any:
        self.began = self._now()
        output = self.forward(*inputs, **options)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.grad_fn.register_prehook(self._backward_begins)  # cheaper than a hook on the tensor
        return output

    # At the end of a backward, callbacks are called in the order in which they came: `_computed`; then DDP's, which
    # comes with the last gradient and waits for all-reduces; then `_ended`, which comes when `_computed` is called.

    def _backward_begins(self, _gradients: Any) -> None:
        Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self.computed = self._now()
        Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        self.spans.append((self.began, self.computed, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> tuple[float, float]:
        """Own and exposed, each summed up since the last call."""
        spans, self.spans = self.spans, []
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        own = sum(self._between(began, computed) for began, computed, _ in spans)
        return own, sum(self._between(computed, ended) for _, computed, ended in spans)

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1000 if self.device.type == "cuda" else second - first


def compare(own: list[float]) -> dict[str, float]:
    """The slowest rank, its own seconds a step, and the median of the others'; {} for one rank.

    >>> compare([0.01, 0.03, 0.01])
    {'slowest_rank': 1, 'slowest_s': 0.03, 'others_s': 0.01}
    """
    if len(own) < 2:
        return {}
    slowest = max(range(len(own)), key=own.__getitem__)
    others = median(seconds for rank, seconds in enumerate(own) if rank != slowest)
    return {"slowest_rank": slowest, "slowest_s": own[slowest], "others_s": others}


def stands_out(own: float, others: float) -> bool:
    """Whether a rank with so many seconds a step is slow beside the others'."""
    return own > max(TIMES * others, others + LEAST)


class Suspicion:
    """From row to row: names a rank that is slow in IN_A_ROW steps one after the other, once."""

    def __init__(self) -> None:
        self.rank, self.steps, self.named = -1, 0, set()

    def look(self, row: dict[str, float], steps: int) -> str | None:
        """The sentence, when it is time for it; the row stands for so many steps."""
        if "slowest_rank" not in row:
            return None
        rank, own, others = row["slowest_rank"], row["slowest_s"], row["others_s"]
        slow = stands_out(own, others)
        self.steps = (self.steps if rank == self.rank else 0) + steps if slow else 0
        self.rank = rank
        if self.steps < IN_A_ROW or rank in self.named:
            return None
        self.named.add(rank)
        return (
            f"rank {rank} is slow: it needs {own * 1000:.0f} ms a step before it waits for others, which need "
            f"{others * 1000:.0f} ms, so they wait for it in each step"
        )
