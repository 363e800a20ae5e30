"""Naive all-reduce: everybody sends everything to rank 0, which combines it and sends the result back to each.

Right, and slow: all bytes pass through the one link of rank 0, which carries (N-1)·M in and (N-1)·M out.

Bytes: rank 0 sends (N-1)·M, each other rank M.
"""

import torch

from course_lib.collectives.operand import opened
from course_lib.collectives.transport import Transport, chosen


def all_reduce(tensor: torch.Tensor, op: str = "sum", transport: Transport | None = None) -> None:
    """Replace `tensor` by its sum, mean or max over all ranks, in place. See `ring.all_reduce` for the arguments."""
    t = chosen(transport)
    with opened(tensor, op, t.size) as operand:
        if t.rank:
            t.send(operand.flat, 0)
            t.recv(operand.flat, 0)
            return
        for source in range(1, t.size):
            t.recv(operand.flat, source, operand.combine)
        operand.finish(operand.flat)
        for to in range(1, t.size):
            t.send(operand.flat, to)


def sent(rank: int, numel: int, itemsize: int, size: int) -> int:
    """Bytes that `rank` of `size` ranks sends in `all_reduce` of `numel` elements of `itemsize` bytes."""
    return numel * itemsize * (1 if rank else size - 1)
