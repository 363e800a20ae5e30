"""From what each rank recorded in a tracked run to moves between ranks, step by step; no drawing here."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from course_lib.collectives.tracked import Event, Track, ranks_in

Span = tuple[int, int]  # first element, number of elements


@dataclass(frozen=True)
class Move:
    """One message. A span is None where the buffer is no part of the tensor and nothing there tells its place."""

    step: int  # 1, 2, ...
    src: int
    dst: int
    nbytes: int
    payload: list[float]
    source: Span | None  # of the sender's tensor
    target: Span | None  # of the receiver's tensor
    arrived: bool  # the receiver has got it
    kind: str  # "add": what arrived was added, "store": it replaced what was there, "": anything else


def decode(value: float, size: int) -> dict[int, int] | None:
    """Which of the `size` ranks are in a value and how often, also where the sum was divided for a mean.

    >>> decode(1 + 8, 2), decode((1 + 8) / 2, 2), decode(0.3, 2), decode(64, 2)
    ({0: 1, 1: 1}, {0: 1, 1: 1}, None, None)
    """
    found = ranks_in(value)
    if found is None:
        found = ranks_in(value * size)
    return None if found is None or max(found, default=0) >= size else found


class Story:
    """What happened in a tracked run: `moves`, and the `tensor` of each rank after each step."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.tracks = tracks
        self.size, self.numel = len(tracks), tracks[0].numel
        self._pairs = _pairs(tracks)
        self._step = _in_turn(tracks, self._pairs) or _by_clock(tracks, self._pairs)

    @property
    def steps(self) -> int:
        return max(self._step.values(), default=0)

    @property
    def total(self) -> float:
        """What each element should be: every rank once."""
        return float(sum(track.start[0] for track in self.tracks)) if self.numel else 0.0

    @cached_property
    def moves(self) -> list[Move]:
        """All messages, by step and sender."""
        found = [_move(self._step[_key(send)], send, recv) for send, recv in self._pairs]
        return sorted(found, key=lambda move: (move.step, move.src, move.dst))

    def moves_of(self, step: int) -> list[Move]:
        return [move for move in self.moves if move.step == step]

    def tensor(self, rank: int, step: int) -> list[float]:
        """What the rank's tensor held after `step`; step 0 is before the first."""
        track = self.tracks[rank]
        if step >= self.steps:
            return track.end
        done = [event for event in track.events if event.kind == "recv" and self._step.get(_key(event), 0) <= step]
        return done[-1].after if done and step else track.start

    def sent(self, rank: int, step: int) -> int:
        """Bytes that the rank has sent up to and with `step`."""
        return sum(move.nbytes for move in self.moves if move.src == rank and move.step <= step)

    def phase(self, step: int) -> str:
        """What the messages of a step do, if all do the same: in a ring, the name of the phase."""
        moves = self.moves_of(step)
        kinds = {move.kind for move in moves}
        if len(kinds) != 1 or "" in kinds:
            return ""
        kind = kinds.pop()
        each = sorted(move.src for move in moves) == list(range(self.size))
        if each and self.steps == 2 * (self.size - 1) and (kind == "add") == (step < self.size):
            return "reduce-scatter" if kind == "add" else "all-gather"
        return "what arrives is added" if kind == "add" else "what arrives is stored"


def _key(event: Event) -> tuple[int, int]:
    return event.rank, event.order


def _pairs(tracks: Sequence[Track]) -> list[tuple[Event, Event | None]]:
    """Each send with its receive: in order for each pair of ranks; a receive from anyone takes what is left."""
    waiting: dict[tuple[int, int], deque[Event]] = defaultdict(deque)
    for track in tracks:
        for event in track.events:
            if event.kind == "recv" and event.peer is not None:
                waiting[event.peer, event.rank].append(event)
    anyone = {track.rank: deque(e for e in track.events if e.kind == "recv" and e.peer is None) for track in tracks}
    pairs = []
    for send in sorted((e for track in tracks for e in track.events if e.kind == "send"), key=lambda e: e.time):
        queue = waiting[send.rank, send.peer] or anyone[send.peer]
        pairs.append((send, queue.popleft() if queue else None))
    return pairs


def _in_turn(tracks: Sequence[Track], pairs: list) -> dict | None:
    """Steps by counting: a rank's k-th send and k-th receive are step k. None if senders and receivers disagree."""
    turn = {}
    for track in tracks:
        for kind in ("send", "recv"):
            calls = [event for event in track.events if event.kind == kind]
            turn |= {_key(event): number for number, event in enumerate(calls, 1)}
    return turn if all(recv and turn[_key(send)] == turn[_key(recv)] for send, recv in pairs) else None


def _by_clock(tracks: Sequence[Track], pairs: list) -> dict:
    """Steps by a logical clock (Lamport 1978): a send comes after all that its rank has sent or received before."""
    sender = {_key(recv): _key(send) for send, recv in pairs if recv}
    clock, step = [0] * len(tracks), {}
    left = {track.rank: deque(track.events) for track in tracks}
    moved = True
    while moved:
        moved = False
        for rank, events in left.items():
            while events and (events[0].kind == "send" or sender.get(_key(events[0])) in (None, *step)):
                key = _key(events.popleft())
                send = sender.get(key)
                step[key] = step[send] if send else clock[rank] + 1
                clock[rank] = max(clock[rank], step[key])
                moved = True
    return step


def _move(step: int, send: Event, recv: Event | None) -> Move:
    source = (send.offset, send.length) if send.offset is not None else None
    target = _target(recv) if recv else None
    kind = ""
    if recv and target and target[1] == recv.length:
        inside = slice(target[0], sum(target))
        before, after = recv.state[inside], recv.after[inside]
        if recv.offset is None and after == [a + b for a, b in zip(before, recv.payload, strict=True)]:
            kind = "add"
        elif after == recv.payload:
            kind = "store"
    return Move(step, send.rank, send.peer, send.nbytes, send.payload, source or target, target, recv is not None, kind)


def _target(recv: Event) -> Span | None:
    """Where in the tensor the data went: the buffer's place, or what changed right after it had arrived."""
    if recv.offset is not None:
        return recv.offset, recv.length
    changed = [k for k, (old, new) in enumerate(zip(recv.state, recv.after, strict=True)) if old != new]
    if not changed or changed[-1] - changed[0] + 1 > recv.length:
        return None
    return changed[0], recv.length if changed[0] + recv.length <= len(recv.after) else len(changed)
