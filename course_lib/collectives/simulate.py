"""Run a collective on simulated ranks: the same code, real data, and a clock that only messages and sums move.

The ranks are threads of this process that hand a baton to each other, so exactly one runs at any moment. Each
message carries its sender's logical clock, as in Lamport, "Time, clocks, and the ordering of events in a distributed
system", Comm. ACM 21(7), 1978; the costs are those of Hockney's model, see topology.py:

- A message starts when the sender has called and the receiver has called (gloo and NCCL wait for both, too) and the
  uplink is free, where one is shared. It takes alpha + n * beta seconds and keeps the uplink for n * beta of them.
- A rank sends one message at a time and receives one at a time; both may go on together (`exchange`).
- A receiver that combines needs gamma * n more. Everything else that a rank computes takes no time.

Always the earliest thing happens next, ranks in order where two are equally early: the result is the same each time.
"""

import heapq
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.collectives.baton import Call, Player, SimulatedTransport, SimulationError
from course_lib.collectives.topology import Topology
from course_lib.collectives.transport import COMBINE
from course_lib.launch.result import Message, Result

__all__ = ["Simulation", "SimulationError", "simulate", "simulate_all_reduce"]


@dataclass(repr=False)
class Simulation(Result):
    """A `Result` whose seconds are simulated, so `show.messages` draws it. And exact bytes:

    clocks[k]      seconds at which rank k had finished
    sent[k]        bytes that rank k sent
    links[a, b]    bytes from rank a to rank b
    uplinks[node]  bytes that the ranks of a node sent to other nodes
    """

    clocks: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    uplinks: dict[int, int] = field(default_factory=dict)


def simulate(fn: Callable[..., Any], topology: Topology, args: tuple = (), patience: float = 60.0) -> Simulation:
    """Call `fn(transport, *args)` on each rank of `topology`; what it returns is in `Simulation.results`.

    patience   real seconds that one rank may compute between two calls

    Raises SimulationError: a rank raised, never came back, or all of them wait for each other.
    """
    return _World(topology, patience).play(fn, args)


def simulate_all_reduce(
    all_reduce: Callable[..., Any], numel: int, topology: Topology, dtype: torch.dtype = torch.float32, **options: Any
) -> Simulation:
    """The times and bytes of one `all_reduce(tensor, transport=..., **options)`, for any size.

    The tensors are torch's "meta" tensors: they have a length but no memory, so a gigabyte costs nothing here.
    """
    return simulate(
        lambda t: all_reduce(torch.empty(numel, dtype=dtype, device="meta"), transport=t, **options), topology
    )


class _World:
    """All ranks, the messages under way, and what has been sent."""

    def __init__(self, topology: Topology, patience: float) -> None:
        self.topology, self.patience = topology, patience
        self.turn = threading.Semaphore(0)  # released by the rank that hands the baton back
        self.players = [Player(rank, self.turn) for rank in range(topology.ranks)]
        self.open: dict[tuple[int, int, bool], deque[Call]] = defaultdict(deque)  # by source, destination, sending
        self.under_way: list[tuple[float, int, int, Call, Call]] = []  # heap: when both sides were ready, who, whom
        self.busy: dict[tuple[str, int], float] = defaultdict(float)  # until when, of each shared uplink
        self.calls: list[Call] = []
        self.links: Counter[tuple[int, int]] = Counter()

    def play(self, fn: Callable[..., Any], args: tuple) -> Simulation:
        for player in self.players:
            player.begin(fn, (SimulatedTransport(player, len(self.players)), *args))
        try:
            while self._next():
                pass
        finally:
            for player in self.players:
                player.stop()
        return self._result()

    def _next(self) -> bool:
        """The earliest thing: a rank goes on, or a message is carried. False when all ranks have finished."""
        ready = min((p for p in self.players if p.state == "ready"), key=lambda p: p.clock, default=None)
        if ready and not (self.under_way and self.under_way[0][0] < ready.clock):
            for call in ready.go(self.patience):
                self._post(call)
        elif self.under_way:
            _, source, to, send, recv = heapq.heappop(self.under_way)
            self._carry(source, to, send, recv)
        elif any(player.state == "waiting" for player in self.players):
            waiting = "; ".join(player.story() for player in self.players)
            raise SimulationError(f"The simulated ranks wait for each other: {waiting}.")
        return any(player.state != "finished" for player in self.players)

    def _post(self, call: Call) -> None:
        """The k-th send from a to b meets the k-th receive from a on b."""
        self.calls.append(call)
        if not 0 <= call.peer < len(self.players) or call.peer == call.rank:
            raise SimulationError(f"rank {call.rank} calls {call.story()}: there is no such other rank.")
        source, to = (call.rank, call.peer) if call.sends else (call.peer, call.rank)
        others = self.open[source, to, not call.sends]
        if not others:
            self.open[source, to, call.sends].append(call)
            return
        other = others.popleft()
        send, recv = (call, other) if call.sends else (other, call)
        if (send.tensor.numel(), send.tensor.dtype) != (recv.tensor.numel(), recv.tensor.dtype):
            raise SimulationError(
                f"rank {source} sends {send.what()} to rank {to} ({send.where}), which expects {recv.what()} "
                f"({recv.where})."
            )
        heapq.heappush(self.under_way, (max(send.start, recv.start), source, to, send, recv))

    def _carry(self, source: int, to: int, send: Call, recv: Call) -> None:
        link, nbytes = self.topology.link(source, to), send.nbytes
        uplinks = self.topology.resources(source, to)
        start = max(send.start, recv.start, *(self.busy[name] for name in uplinks))
        for name in uplinks:
            self.busy[name] = start + nbytes * link.beta
        send.end = recv.end = start + link.seconds(nbytes)
        if recv.op is None:
            recv.tensor.copy_(send.tensor)
        else:
            COMBINE[recv.op](recv.tensor, send.tensor)
            recv.end += nbytes * self.topology.gamma
        self.links[source, to] += nbytes
        for rank in (source, to):
            self.players[rank].go_on_when_done()

    def _result(self) -> Simulation:
        everyone = tuple(range(len(self.players)))
        messages = [
            Message(call.rank, call.name, call.peer, call.nbytes, call.start, call.end, call.where, ranks=everyone)
            for call in sorted(self.calls, key=lambda call: (call.start, call.rank, not call.sends))
        ]
        clocks = [player.clock for player in self.players]
        sent, uplinks = [0] * len(clocks), Counter()
        for (a, b), nbytes in self.links.items():
            sent[a] += nbytes
            if self.topology.node_of[a] != self.topology.node_of[b]:
                uplinks[self.topology.node_of[a]] += nbytes
        results = [player.value for player in self.players]
        counted = {"clocks": clocks, "sent": sent, "links": dict(self.links), "uplinks": dict(uplinks)}
        return Simulation(results, [""] * len(clocks), messages, max(clocks), **counted)
