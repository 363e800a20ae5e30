"""From the calls that each rank made to what happened between ranks: transfers and collectives.

A send is matched to a receive as torch.distributed does it: in order, by (source, destination, tag, group).
The k-th collective that a rank calls on a group belongs together with the k-th of every other rank of it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from course_lib.launch.result import Message

SENDS = ("send", "isend")
RECEIVES = ("recv", "irecv")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message from a rank to another. `send` or `recv` is None where the other side never called."""

    send: Message | None
    recv: Message | None

    @property
    def src(self) -> int | None:
        return self.send.rank if self.send else self.recv.peer

    @property
    def dst(self) -> int:
        return self.recv.rank if self.recv else self.send.peer

    @property
    def calls(self) -> tuple[Message, ...]:
        return tuple(call for call in (self.send, self.recv) if call)

    @property
    def start(self) -> float:
        """Seconds: when the sender called; for a receive without a sender, when the receiver did."""
        return self.calls[0].start


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: a call of each rank that took part, in rank order. `missing` never called it."""

    calls: tuple[Message, ...]
    missing: tuple[int, ...]

    @property
    def start(self) -> float:
        return min(call.start for call in self.calls)

    @property
    def ready(self) -> float:
        """Seconds: when the last rank arrived. Before that the others can only wait."""
        return max(call.start for call in self.calls)

    @property
    def names(self) -> list[str]:
        """The operations called: more than one means that the ranks did not agree."""
        return sorted({call.op.removesuffix("_async") for call in self.calls})


Event = Transfer | Collective


def events(messages: Iterable[Message]) -> list[Event]:
    """All transfers and collectives of a run, by the time at which they began."""
    calls = sorted(messages, key=lambda call: (call.start, call.rank))
    found: list[Event] = [*_transfers(calls), *_collectives(calls)]
    return sorted(found, key=lambda event: (event.start, event.calls[0].rank))


def _transfers(calls: list[Message]) -> Iterable[Transfer]:
    sent: dict[tuple, deque[Message]] = defaultdict(deque)
    for call in calls:
        if call.op in SENDS:
            sent[call.rank, call.peer, call.tag, call.ranks].append(call)
    from_anyone = []
    for call in calls:
        if call.op not in RECEIVES:
            continue
        if call.peer is None:
            from_anyone.append(call)
            continue
        waiting = sent[call.peer, call.rank, call.tag, call.ranks]
        yield Transfer(waiting.popleft() if waiting else None, call)
    # A receive from any rank gets what the named receives left over, the earliest first.
    for call in from_anyone:
        fitting = [queue for (_, dst, tag, _), queue in sent.items() if queue and (dst, tag) == (call.rank, call.tag)]
        first = min(fitting, key=lambda queue: queue[0].start, default=None)
        yield Transfer(first.popleft() if first else None, call)
    for queue in sent.values():
        yield from (Transfer(call, None) for call in queue)


def _collectives(calls: list[Message]) -> Iterable[Collective]:
    turn: dict[tuple, int] = defaultdict(int)
    together: dict[tuple, list[Message]] = defaultdict(list)
    for call in calls:
        if call.op in SENDS + RECEIVES:
            continue
        together[call.ranks, turn[call.ranks, call.rank]].append(call)
        turn[call.ranks, call.rank] += 1
    for (group, _), members in together.items():
        present = {call.rank for call in members}
        members.sort(key=lambda call: call.rank)
        yield Collective(tuple(members), tuple(rank for rank in group if rank not in present))
