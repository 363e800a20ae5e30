"""Which ranks are near each other: nodes, the links inside and between them, and who shares an uplink."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """What a message of n bytes costs: alpha + n * beta seconds (Hockney, Parallel Computing 20(3), 1994)."""

    alpha: float  # seconds a message, whatever its size: the latency
    beta: float  # seconds a byte: 1 / bandwidth

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number of seconds, 0 or more, not {getattr(self, name)!r}.")

    def seconds(self, nbytes: float) -> float:
        """Time of one message."""
        return self.alpha + nbytes * self.beta


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks on nodes. Another object with the same attributes and methods will do for `simulate`.

    node_of        node_of[rank] is the node that the rank runs on
    inside         the link of two ranks of one node
    between        the link of two ranks of different nodes
    gamma          seconds a byte that a rank needs to combine what arrived with what it has
    shared_uplink  True: the ranks of a node share one cable to the other nodes, which carries the bytes of one
                   message at a time, in each direction; False: each rank has its own
    """

    node_of: tuple[int, ...]
    inside: Link
    between: Link
    gamma: float = 0.0
    shared_uplink: bool = False

    def __post_init__(self) -> None:
        if not self.node_of:
            raise ValueError("A topology needs at least one rank: node_of is empty.")
        if not 0 <= self.gamma < float("inf"):
            raise ValueError(f"gamma must be a number of seconds a byte, 0 or more, not {self.gamma!r}.")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.node_of)

    def link(self, a: int, b: int) -> Link:
        """The link from rank a to rank b."""
        return self.inside if self.node_of[a] == self.node_of[b] else self.between

    def resources(self, a: int, b: int) -> tuple[tuple[str, int], ...]:
        """What a message from a to b shares with others: ("out", node) and ("in", node), or nothing."""
        source, target = self.node_of[a], self.node_of[b]
        return (("out", source), ("in", target)) if self.shared_uplink and source != target else ()


def flat(ranks: int, alpha: float, beta: float, gamma: float = 0.0) -> Topology:
    """Every rank is equally near to every other, and each has its own link."""
    _check(ranks=ranks)
    link = Link(alpha, beta)
    return Topology((0,) * ranks, link, link, gamma)


def cluster(
    nodes: int, per_node: int, inside: Link, between: Link, gamma: float = 0.0, shared_uplink: bool = True
) -> Topology:
    """`nodes` equal nodes; node 0 has the ranks 0 to per_node - 1, and so on, as torchrun numbers them."""
    _check(nodes=nodes, per_node=per_node)
    return Topology(tuple(r // per_node for r in range(nodes * per_node)), inside, between, gamma, shared_uplink)


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, not {count!r}.")
