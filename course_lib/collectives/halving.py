"""Recursive halving and doubling: reduce-scatter and all-gather as in the ring, but in log2 N steps each.

Rabenseifner's algorithm, from Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005. In each step of the first phase two ranks share
the part that both have: each keeps one half, gets the other's values of it, and sends its values of the other
half. In the second phase the same pairs, in the opposite order, give each other what they have finished.
Partners are 1, 2, 4, ... ranks apart, so that the largest messages go to the nearest ranks.

N ranks that are no power of two: with P the largest power of two in N, ranks P, P+1, ... first send all they have
to ranks 0, 1, ... and get the result at the end.

Bytes: 2(P-1)/P·M on each of the first P ranks when P divides the length; M more on those that serve another rank;
M on ranks from P on. For other lengths `sent` adds up the parts.
"""

from collections.abc import Iterator

import torch

from course_lib.collectives.chunks import length
from course_lib.collectives.operand import Operand, opened
from course_lib.collectives.transport import Sub, Transport, chosen


def all_reduce(tensor: torch.Tensor, op: str = "sum", transport: Transport | None = None) -> None:
    """Replace `tensor` by its sum, mean or max over all ranks, in place. See `ring.all_reduce` for the arguments."""
    t = chosen(transport)
    core = power_of_two(t.size)
    with opened(tensor, op, t.size) as operand:
        if t.rank >= core:
            t.send(operand.flat, t.rank - core)
            t.recv(operand.flat, t.rank - core)
            return
        served = t.rank + core if t.rank + core < t.size else None
        if served is not None:
            t.recv(operand.flat, served, operand.combine)
        _halve_and_double(operand, Sub(t, range(core)))
        if served is not None:
            t.send(operand.flat, served)


def _halve_and_double(operand: Operand, t: Transport) -> None:
    """All-reduce among 2^k ranks."""
    steps = list(_steps(t.rank, operand.flat.numel(), t.size))
    for partner, keep, give in steps:
        t.exchange(operand.flat[give], partner, operand.flat[keep], partner, operand.combine)
    operand.finish(operand.flat[steps[-1][1]] if steps else operand.flat)
    for partner, keep, give in reversed(steps):
        t.exchange(operand.flat[keep], partner, operand.flat[give], partner)


def _steps(rank: int, numel: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """(partner, elements to keep, elements to give away) for each halving.

    >>> list(_steps(1, 8, 4))
    [(0, slice(4, 8, None), slice(0, 4, None)), (3, slice(4, 6, None), slice(6, 8, None))]
    """
    start = [sum(length(numel, size, c) for c in range(chunk)) for chunk in range(size + 1)]
    low, high, distance = 0, size, 1  # the chunks that this rank still works on
    while distance < size:
        middle = (low + high) // 2
        lower, upper = slice(start[low], start[middle]), slice(start[middle], start[high])
        if rank & distance:
            yield rank ^ distance, upper, lower
            low = middle
        else:
            yield rank ^ distance, lower, upper
            high = middle
        distance *= 2


def power_of_two(size: int) -> int:
    """The largest power of two that is not above `size`.

    >>> [power_of_two(size) for size in (1, 2, 3, 4, 7)]
    [1, 2, 2, 4, 4]
    """
    return 1 << size.bit_length() - 1


def sent(rank: int, numel: int, itemsize: int, size: int) -> int:
    """Bytes that `rank` of `size` ranks sends in `all_reduce` of `numel` elements of `itemsize` bytes."""
    core = power_of_two(size)
    if rank >= core:
        return numel * itemsize
    elements = sum(part.stop - part.start for _, *parts in _steps(rank, numel, core) for part in parts)
    return (elements + numel * (rank + core < size)) * itemsize
