"""How long an all-reduce takes, in closed form: messages, bytes and sums on the longest chain of each algorithm.

Hockney's model: a message of n bytes takes alpha + n * beta seconds, adding n bytes takes gamma * n seconds, and a
rank can send one message and receive another at the same time. The formulas are those of

- Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", Int. J. High Perform.
  Comput. Appl. 19(1), 2005: the model (section 3), binomial trees, halving-doubling;
- Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
  Comput. 69(2), 2009: the ring, and that no algorithm can send less than 2(N-1)/N of the tensor.

They hold exactly (the tests compare with `simulate`, which runs the real code) where each cut of the tensor comes out
even; a shared uplink is the one exception, see `hierarchical`. Elsewhere the longest chunk sets the pace: the time
lies between that for `nbytes` and that for the next size that can be cut evenly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.collectives.topology import Link


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds = messages * alpha + volume * nbytes * beta + sums * nbytes * gamma, for one link or for two.

    messages, volume   on the chain that takes longest; volume and sums count whole tensors: 1.5 is 1.5 * nbytes
    inside             the same for the fast links inside a node, where an algorithm tells them apart
    """

    messages: float
    volume: float
    sums: float
    inside: tuple[float, float] = (0.0, 0.0)


def naive(ranks: int) -> Terms:
    """Rank 0 receives from each other rank in turn, adds, and sends the result to each in turn."""
    return Terms(2 * (ranks - 1), 2 * (ranks - 1), ranks - 1)


def tree(ranks: int) -> Terms:
    """A binomial tree up and the same tree down: ceil(log2 N) levels, a whole tensor on each."""
    levels = math.ceil(math.log2(ranks))
    return Terms(2 * levels, 2 * levels, levels)


def ring(ranks: int) -> Terms:
    """2(N-1) steps with 1/N of the tensor; the first N-1 of them add."""
    return Terms(2 * (ranks - 1), 2 * (ranks - 1) / ranks, (ranks - 1) / ranks)


def halving(ranks: int) -> Terms:
    """Halve the tensor and the group log2 P times, then double back; P is the largest power of two in N.

    The N - P ranks that are left over hand their tensor to a partner first and get the result in the end.
    """
    core = 1 << (ranks.bit_length() - 1)
    levels, extra = core.bit_length() - 1, int(ranks > core)
    part = (core - 1) / core
    return Terms(2 * (levels + extra), 2 * (part + extra), part + extra)


def hierarchical(ranks: int, node_size: int, shared_uplink: bool = False) -> Terms:
    """Ring reduce-scatter in each node, rings between the nodes (one for each place in a node), all-gather inside.

    With a shared uplink the `node_size` rings of the second stage queue up. The formula lets all of them end a step
    before the next begins. In truth one ring waits for its latency and adds while another one's bytes are on the
    cable, so the formula is an upper bound: too high by less than the latencies and sums of that stage.
    """
    nodes, chunk = ranks // node_size, 1 / node_size
    outside, crowd = ring(nodes), node_size if shared_uplink else 1
    sums = (node_size - 1) * chunk + outside.sums * chunk
    within = (2 * (node_size - 1), 2 * (node_size - 1) * chunk)
    return Terms(outside.messages, outside.volume * chunk * crowd, sums, within)


ALGORITHMS: dict[str, Callable[[int], Terms]] = {"naive": naive, "tree": tree, "halving": halving, "ring": ring}


def terms(algorithm: str, ranks: int, node_size: int | None = None, shared_uplink: bool = False) -> Terms:
    """The numbers in front of alpha, beta and gamma. ValueError for what cannot be."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be a whole number, 1 or more, not {ranks!r}.")
    if algorithm == "hierarchical":
        if not node_size or node_size < 1 or ranks % node_size:
            raise ValueError(f"hierarchical needs a node_size that divides the {ranks} ranks, not {node_size!r}.")
        return hierarchical(ranks, node_size, shared_uplink)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"There is no algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}, hierarchical.")
    return ALGORITHMS[algorithm](ranks)


def predict(
    algorithm: str,
    nbytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    *,
    node_size: int | None = None,
    inside: Link | None = None,
    shared_uplink: bool = False,
) -> float:
    """Seconds for an all-reduce of `nbytes` bytes on `ranks` ranks.

    alpha          seconds a message
    beta, gamma    seconds a byte that is sent, that is added
    node_size      for "hierarchical": ranks of a node; `alpha` and `beta` are then those between nodes
    inside         the link inside a node; without it, the same as between nodes
    shared_uplink  the ranks of a node share one link to the other nodes

    On two levels, "ring" runs at the pace of its slowest link, so give it those between nodes.
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


def fastest(nbytes: float, ranks: int, alpha: float, beta: float, gamma: float = 0.0, among=tuple(ALGORITHMS)) -> str:
    """The name of the algorithm with the shortest predicted time; the first of `among` where two are equal."""
    return min(among, key=lambda name: predict(name, nbytes, ranks, alpha, beta, gamma))
