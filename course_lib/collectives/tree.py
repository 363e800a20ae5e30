"""Binomial tree: values flow from the leaves to rank 0 and are combined on the way, then the result flows back.

Rank r's parent is r with its lowest set bit cleared; its children are r + 1, r + 2, r + 4, ... below that bit.
For N = 8:  0 -> 4, 2, 1    4 -> 6, 5    2 -> 3    6 -> 7.
Each way takes ceil(log2 N) steps (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005): few messages, which is
good for short tensors, but each carries the whole tensor.

Bytes: rank r sends M to each child, and M to its parent unless it is rank 0.
"""

import torch

from course_lib.collectives.operand import opened
from course_lib.collectives.transport import Transport, chosen


def all_reduce(tensor: torch.Tensor, op: str = "sum", transport: Transport | None = None) -> None:
    """Replace `tensor` by its sum, mean or max over all ranks, in place. See `ring.all_reduce` for the arguments."""
    t = chosen(transport)
    with opened(tensor, op, t.size) as operand:
        reduce(operand.flat, t, operand.combine)
        if t.rank == 0:
            operand.finish(operand.flat)
        broadcast(operand.flat, t)


def reduce(flat: torch.Tensor, t: Transport, op: str = "sum") -> None:
    """In place; afterwards rank 0 holds the result, all others what their branch of the tree came to."""
    for child in children(t.rank, t.size):  # the smallest branch is ready first
        t.recv(flat, child, op)
    if t.rank:
        t.send(flat, parent(t.rank))


def broadcast(flat: torch.Tensor, t: Transport) -> None:
    """In place; all ranks end with what rank 0 has."""
    if t.rank:
        t.recv(flat, parent(t.rank))
    for child in reversed(children(t.rank, t.size)):  # the largest branch has the longest way to go
        t.send(flat, child)


def parent(rank: int) -> int:
    """Whom a rank other than 0 sends to: the lowest set bit cleared.

    >>> [parent(rank) for rank in range(1, 8)]
    [0, 0, 2, 0, 4, 4, 6]
    """
    return rank & (rank - 1)


def children(rank: int, size: int) -> list[int]:
    """The ranks whose parent this is, in ascending order.

    >>> children(0, 6), children(4, 6), children(2, 3)
    ([1, 2, 4], [5], [])
    """
    lowest = rank & -rank or size
    return [rank + 2**k for k in range(size.bit_length()) if 2**k < lowest and rank + 2**k < size]


def sent(rank: int, numel: int, itemsize: int, size: int) -> int:
    """Bytes that `rank` of `size` ranks sends in `all_reduce` of `numel` elements of `itemsize` bytes."""
    return numel * itemsize * (len(children(rank, size)) + (rank > 0))
