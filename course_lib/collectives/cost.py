"""How long an all-reduce takes, in closed form: messages, bytes and sums on the longest chain of each algorithm.

Hockney's model: a message of n bytes takes alpha + n * beta seconds, adding n bytes takes gamma * n seconds, and a
rank can send one message and receive another at the same time. The formulas are those of

- Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High Perform.
  Comput. Appl. 19(1), 2005: the model (section 3), binomial trees, halving-doubling;
- Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
  Comput. 69(2), 2009: the ring, and that no algorithm can send less than 2(N-1)/N of the tensor.

They hold exactly (the tests compare with `simulate`, which runs the real code) where each cut of the tensor comes out
even; a shared uplink is the one exception, see `predict`. Elsewhere the longest chunk sets the pace: the time
lies between that for `nbytes` and that for the next size that can be cut evenly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.collectives.topology import Link


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds = messages * alpha + volume * nbytes * beta + sums * nbytes * gamma, for one kind of link or for two.

    messages, volume   on the chain that takes longest; volume and sums count whole tensors: 1.5 is 1.5 * nbytes
    inside             messages and volume over the links inside a node
    """

    messages: float
    volume: float
    sums: float
    inside: tuple[float, float] = (0.0, 0.0)


def naive(nodes: int, node_size: int, crowd: int) -> Terms:
    """Rank 0 receives from each other rank in turn, adds, and sends the result to each in turn."""
    far, near = (nodes - 1) * node_size, node_size - 1
    return Terms(2 * far, 2 * far, far + near, (2 * near, 2 * near))


def tree(nodes: int, node_size: int, crowd: int) -> Terms:
    """A binomial tree up and the same tree down: ceil(log2 N) levels, a whole tensor on each; the first are near."""
    far, near = math.ceil(math.log2(nodes)), _log2(node_size, "tree")
    return Terms(2 * far, 2 * far, far + near, (2 * near, 2 * near))


def ring(nodes: int, node_size: int, crowd: int) -> Terms:
    """2(N-1) steps with 1/N of the tensor; the first N-1 of them add. The slowest link sets the pace of all."""
    ranks = nodes * node_size
    steps, volume = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    if nodes > 1:
        return Terms(steps, volume, volume / 2)
    return Terms(0, 0, volume / 2, (steps, volume))


def halving(nodes: int, node_size: int, crowd: int) -> Terms:
    """Halve the tensor and the group log2 P times, then double back; P is the largest power of two in N.

    The N - P ranks that are left over hand their tensor to a partner first and get the result in the end.
    """
    near, core = _log2(node_size, "halving"), 1 << (nodes.bit_length() - 1)  # core: nodes among the P ranks
    far, extra = core.bit_length() - 1, int(nodes > core)
    within, across = (node_size - 1) / node_size, (core - 1) / core / node_size
    volume = 2 * (across + extra) * crowd
    return Terms(2 * (far + extra), volume, within + across + extra, (2 * near, 2 * within))


def hierarchical(nodes: int, node_size: int, crowd: int) -> Terms:
    """Ring reduce-scatter in each node, rings between the nodes (one for each place in a node), all-gather inside."""
    chunk, outside = 1 / node_size, ring(nodes, 1, 1)
    within = (node_size - 1) * chunk
    volume = outside.volume * chunk * crowd
    return Terms(outside.messages, volume, within + outside.sums * chunk, (2 * (node_size - 1), 2 * within))


def _log2(node_size: int, name: str) -> int:
    if node_size & (node_size - 1):
        raise ValueError(f"There is no closed formula for {name!r} with node_size={node_size}: give a power of two.")
    return node_size.bit_length() - 1


FORMULAS: dict[str, Callable[[int, int, int], Terms]] = {
    "naive": naive,
    "tree": tree,
    "halving": halving,
    "ring": ring,
    "hierarchical": hierarchical,
}
ALGORITHMS = ("naive", "tree", "halving", "ring")  # those that need not know about nodes


def terms(algorithm: str, ranks: int, node_size: int = 1, shared_uplink: bool = False) -> Terms:
    """The numbers in front of alpha, beta and gamma. ValueError for what cannot be; see `predict`."""
    for name, count in (("ranks", ranks), ("node_size", node_size)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, not {count!r}.")
    if ranks % node_size:
        raise ValueError(f"node_size={node_size} does not divide {ranks} ranks into nodes of equal size.")
    if algorithm not in FORMULAS:
        raise ValueError(f"There is no algorithm {algorithm!r}: choose one of {', '.join(FORMULAS)}.")
    return FORMULAS[algorithm](ranks // node_size, node_size, node_size if shared_uplink else 1)


def predict(
    algorithm: str,
    nbytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    *,
    node_size: int = 1,
    inside: Link | None = None,
    shared_uplink: bool = False,
) -> float:
    """Seconds for an all-reduce of `nbytes` bytes on `ranks` ranks.

    algorithm      "naive", "tree", "halving", "ring" or "hierarchical"
    alpha          seconds a message
    beta, gamma    seconds a byte that is sent, that is added
    node_size      ranks of a node; `alpha` and `beta` are then those of the links between nodes
    inside         the link inside a node; without it, the same as between nodes
    shared_uplink  the ranks of a node share one link to the other nodes. "halving" and "hierarchical" queue up there.
                   The formula lets all end a step before the next begins. In truth one rank waits for its latency
                   and adds while another one's bytes are on the cable, so the formula is then an upper bound: too
                   high by less than the latencies and sums of the steps between nodes.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes must be 0 or more, not {nbytes!r}.")
    found, near = terms(algorithm, ranks, node_size, shared_uplink), inside or Link(alpha, beta)
    if not nbytes:
        return 0.0  # empty tensors are no messages
    far = found.messages * alpha + found.volume * nbytes * beta
    return far + found.inside[0] * near.alpha + found.inside[1] * nbytes * near.beta + found.sums * nbytes * gamma


def crossover(first: str, second: str, ranks: int, alpha: float, beta: float, gamma: float = 0.0) -> float | None:
    """Bytes at which two algorithms of one level cost the same; None when one of them wins at every size."""
    a, b = terms(first, ranks), terms(second, ranks)
    latency = (a.messages - b.messages) * alpha
    slope = (b.volume - a.volume) * beta + (b.sums - a.sums) * gamma
    return latency / slope if slope and latency / slope > 0 else None


def fastest(nbytes: float, ranks: int, alpha: float, beta: float, gamma: float = 0.0, among=ALGORITHMS) -> str:
    """The name of the algorithm with the shortest predicted time; the first of `among` where two are equal."""
    return min(among, key=lambda name: predict(name, nbytes, ranks, alpha, beta, gamma))
