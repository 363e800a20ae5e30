"""Two-level all-reduce: a ring inside each node, and rings between nodes, which carry only a part of the tensor.

With L ranks on a node and K nodes: (1) reduce-scatter inside the node, so that local rank l holds chunk l, summed over
its node; (2) ring all-reduce of that chunk among the K ranks with local rank l; (3) all-gather inside the node.
What leaves a node: 2(K-1)/K·M/L from each of its ranks, 2(K-1)/K·M in all. In a plain ring with the ranks in node
order one rank alone sends 2(N-1)/N·M across: on two nodes of two ranks 1.5·M instead of 1·M. Many ranks on each of many
nodes bring the two close together; then what is left is that all ranks, and their network cards, share the work.

Bytes: M - |chunk l| in (1), those of the ring for chunk l over K ranks in (2), M - |chunk l+1| in (3): together
2(L-1)/L·M + 2(K-1)/K·M/L when the lengths divide.
"""

import os

import torch

from course_lib.collectives import ring
from course_lib.collectives.chunks import length, split
from course_lib.collectives.operand import opened
from course_lib.collectives.transport import Sub, Transport, chosen


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", transport: Transport | None = None, node_size: int | None = None
) -> None:
    """Replace `tensor` by its sum, mean or max over all ranks, in place. See `ring.all_reduce` for the arguments.

    node_size  how many ranks are on each node: 0 to node_size - 1 on the first, and so on. None: what torchrun
               says (LOCAL_WORLD_SIZE), or else all of them.

    Raises ValueError when the nodes would not be equally large.
    """
    t = chosen(transport)
    node_size = _node_size(node_size, t.size)
    node, local = divmod(t.rank, node_size)
    inside = Sub(t, range(node * node_size, (node + 1) * node_size))
    between = Sub(t, range(local, t.size, node_size))
    with opened(tensor, op, t.size) as operand:
        chunks = split(operand.flat, node_size)
        ring.reduce_scatter(ring.turned(chunks), inside, operand.combine)
        parts = split(chunks[local], between.size)
        ring.reduce_scatter(parts, between, operand.combine)
        operand.finish(parts[(between.rank + 1) % between.size])
        ring.all_gather(parts, between)
        ring.all_gather(ring.turned(chunks), inside)


def sent(rank: int, numel: int, itemsize: int, size: int, node_size: int | None = None) -> int:
    """Bytes that `rank` of `size` ranks sends in `all_reduce` of `numel` elements of `itemsize` bytes."""
    node_size = _node_size(node_size, size)
    node, local = divmod(rank, node_size)
    mine = length(numel, node_size, local)
    inside = 2 * numel - mine - length(numel, node_size, (local + 1) % node_size)
    return inside * itemsize + ring.sent(node, mine, itemsize, size // node_size)


def _node_size(node_size: int | None, size: int) -> int:
    if node_size is None:
        node_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if node_size < 1 or size % node_size:
        raise ValueError(f"node_size={node_size} does not divide {size} ranks into nodes of equal size.")
    return node_size
