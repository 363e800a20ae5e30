"""The course's collectives as one object: a transport and an algorithm, usable as a DDP comm hook."""

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.collectives import halving, hierarchical, naive, ring, tree
from course_lib.collectives.operand import opened
from course_lib.collectives.transport import Sub, Transport, chosen

ALGORITHMS: dict[str, ModuleType] = {
    "ring": ring,
    "naive": naive,
    "tree": tree,
    "halving": halving,
    "hierarchical": hierarchical,
}

# Called in the rank after each collective of a Communicator as (op, bytes, start, end), with times of
# time.monotonic(). Who wants a timeline listens here: no profiler sees a transport of our own.
listeners: list[Callable[[str, int, float, float], None]] = []


def _heard(method: Callable) -> Callable:
    """A collective whose last tensor is what this rank puts in."""

    @functools.wraps(method)
    def call(self: "Communicator", *args: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        method(self, *args, **kwargs)
        end = time.monotonic()
        if listeners:
            tensor = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)][-1]
            for listener in listeners:
                listener(method.__name__, tensor.numel() * tensor.element_size(), start, end)

    return call


class Communicator:
    """Collectives over one transport, which it keeps, with its buffers, for all calls.

    transport  None: torch.distributed's default group
    algorithm  of `all_reduce`: "ring", "naive", "tree", "halving" or "hierarchical"
    check      True: before each all_reduce the ranks compare lengths and dtypes, so that a mismatch is an error that
               names the ranks. It costs one more, small all_reduce.
    options    of the algorithm: node_size for "hierarchical"
    """

    def __init__(
        self, transport: Transport | None = None, algorithm: str = "ring", *, check: bool = False, **options: Any
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={algorithm!r}: choose one of {', '.join(ALGORITHMS)}.")
        allowed = {"node_size"} if algorithm == "hierarchical" else set()
        if not options.keys() <= allowed:
            raise TypeError(f"The algorithm {algorithm!r} has no option {', '.join(options.keys() - allowed)}.")
        self.transport = chosen(transport)
        self.rank, self.size = self.transport.rank, self.transport.size
        self.algorithm, self._module, self._options, self._check = algorithm, ALGORITHMS[algorithm], options, check

    @_heard
    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Sum, mean or max over all ranks, in place; see `ring.all_reduce`."""
        if self._check:
            self._compare(tensor)
        self._module.all_reduce(tensor, op, self.transport, **self._options)

    @_heard
    def reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor, op: str = "sum") -> None:
        """`output` becomes this rank's chunk of the result; by ring, whatever the algorithm of `all_reduce`."""
        ring.reduce_scatter_tensor(output, tensor, op, self.transport)

    @_heard
    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """`output` becomes the chunks of all ranks, in order; by ring."""
        ring.all_gather_into_tensor(output, tensor, self.transport)

    @_heard
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """All ranks get the tensor of rank `src` of the group, in place; by binomial tree."""
        if not 0 <= src < self.size:
            raise ValueError(f"src={src}: the ranks are 0 to {self.size - 1}.")
        from_src = Sub(self.transport, [(src + k) % self.size for k in range(self.size)])  # tree starts at its rank 0
        with opened(tensor, "sum", self.size) as operand:
            tree.broadcast(operand.flat, from_src)

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A DDP comm hook: `model.register_comm_hook(None, communicator.hook)` averages gradients with this.

        It returns when the bucket is done, so nothing overlaps with the rest of backward. `state` is not used.
        """
        gradients = bucket.buffer()
        self.all_reduce(gradients, "mean")
        devices = [gradients.device] if gradients.is_cuda else []
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(gradients)
        return done

    def bytes_sent(self, numel: int, itemsize: int) -> int:
        """What this rank sends in one `all_reduce` of so many elements."""
        return self._module.sent(self.rank, numel, itemsize, self.size, **self._options)

    def _compare(self, tensor: torch.Tensor) -> None:
        """Raise the same ValueError on all ranks when they do not bring equal lengths and dtypes."""
        brought = torch.zeros(self.size, 2, dtype=torch.int64, device=tensor.device)
        brought[self.rank] = torch.tensor([tensor.numel(), tensor.element_size()])
        tree.all_reduce(brought, "sum", self.transport)
        if (brought != brought[0]).any():
            told = "; ".join(f"rank {k}: {n} of {b} bytes" for k, (n, b) in enumerate(brought.tolist()))
            raise ValueError(f"The ranks bring tensors of different size. Elements: {told}.")
