"""Ring all-reduce: reduce-scatter, then all-gather; each rank talks to its two neighbours only.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69(2), 2009. In 2(N-1) steps each rank sends 2(N-1)/N of the tensor, whatever the number of ranks N.
"""

import torch

from course_lib.collectives.transport import Transport


def reduce_scatter(chunks: list[torch.Tensor], t: Transport, op: str = "sum") -> None:
    """In place; afterwards rank r holds the finished chunk (r + 1) % N, all others are partial."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for step in range(t.size - 1):
        t.exchange(chunks[(t.rank - step) % t.size], right, chunks[(t.rank - step - 1) % t.size], left, op)


def all_gather(chunks: list[torch.Tensor], t: Transport) -> None:
    """In place; rank r starts with the finished chunk (r + 1) % N and ends with all of them."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for step in range(t.size - 1):
        t.exchange(chunks[(t.rank + 1 - step) % t.size], right, chunks[(t.rank - step) % t.size], left)
