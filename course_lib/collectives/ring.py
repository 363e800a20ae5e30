"""Ring all-reduce: reduce-scatter, then all-gather; each rank talks to its two neighbours only.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
Comput. 69(2), 2009. In 2(N-1) steps each rank sends 2(N-1)/N of the tensor, whatever the number of ranks N.

Bytes: in the reduce-scatter rank r sends every chunk but chunk r+1 (mod N), in the all-gather every chunk but
chunk r+2. So it sends 2M - |chunk r+1| - |chunk r+2|, which is 2(N-1)/N·M when N divides the length.
"""

import torch

from course_lib.collectives.chunks import length, split
from course_lib.collectives.operand import opened
from course_lib.collectives.transport import Transport, chosen


def all_reduce(tensor: torch.Tensor, op: str = "sum", transport: Transport | None = None) -> None:
    """Replace `tensor` by its sum, mean or max over all ranks, in place, with the same bits on every rank.

    tensor     any shape and length, the same on all ranks; need not be contiguous
    op         "sum", "mean" (floating-point dtypes only) or "max"
    transport  None: torch.distributed's default group

    Raises TypeError or ValueError for a tensor or an op that cannot be, before anything is sent.
    """
    t = chosen(transport)
    with opened(tensor, op, t.size) as operand:
        chunks = split(operand.flat, t.size)
        reduce_scatter(chunks, t, operand.combine)
        operand.finish(chunks[(t.rank + 1) % t.size])
        all_gather(chunks, t)


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


def sent(rank: int, numel: int, itemsize: int, size: int) -> int:
    """Bytes that `rank` of `size` ranks sends in `all_reduce` of `numel` elements of `itemsize` bytes."""
    if size == 1:
        return 0
    kept = length(numel, size, (rank + 1) % size) + length(numel, size, (rank + 2) % size)
    return (2 * numel - kept) * itemsize


def turned(chunks: list[torch.Tensor]) -> list[torch.Tensor]:
    """The chunks renamed, so that what the two phases call chunk (r + 1) % N is chunk r."""
    return chunks[-1:] + chunks[:-1]


def reduce_scatter_tensor(
    output: torch.Tensor, tensor: torch.Tensor, op: str = "sum", transport: Transport | None = None
) -> None:
    """As torch.distributed's: `output` of rank r becomes chunk r of the sum, mean or max of `tensor` over all ranks.

    Lengths need not be divisible: `output` holds as many elements as chunk r of `split`. `tensor` stays as it is,
    so its partial sums take a copy. Rank r sends every chunk but its own, M - |chunk r|.
    """
    t = chosen(transport)
    with opened(output, op, t.size) as mine, opened(tensor.clone(), op, t.size) as whole:
        chunks = split(whole.flat, t.size)
        _check_part(output, chunks[t.rank], t)
        reduce_scatter(turned(chunks), t, whole.combine)
        mine.flat.copy_(chunks[t.rank])
        mine.finish(mine.flat)


def all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, transport: Transport | None = None) -> None:
    """As torch.distributed's: chunk r of `output` becomes the `tensor` of rank r, on all ranks.

    Lengths need not be divisible: `tensor` holds as many elements as chunk r of `split(output, N)`. Rank r sends
    every chunk but the one after its own, M - |chunk r+1|.
    """
    t = chosen(transport)
    with opened(output, "sum", t.size) as whole:
        chunks = split(whole.flat, t.size)
        _check_part(tensor, chunks[t.rank], t)
        chunks[t.rank].copy_(tensor.detach().reshape(-1))
        all_gather(turned(chunks), t)


def _check_part(part: torch.Tensor, chunk: torch.Tensor, t: Transport) -> None:
    if part.dtype != chunk.dtype or part.numel() != chunk.numel():
        raise ValueError(
            f"Rank {t.rank} of {t.size} holds chunk {t.rank}, which has {chunk.numel()} elements of {chunk.dtype}; "
            f"the tensor given for it has {part.numel()} of {part.dtype}."
        )
