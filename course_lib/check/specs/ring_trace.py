"""The traced case of the ring: numbers that remember which rank and which chunk they come from.

Element e of rank r starts as 8**(r*N + c), where c is its chunk. So a float64 holds, in base 8, how often each piece
of the input is in a sum: 16 digits for 4 ranks, of the 17 that are exact. Wrong indices then show as what they are.
"""

from dataclasses import dataclass

import torch

from course_lib.check.group import Evidence
from course_lib.collectives.tracked import Event

LENGTH = 4  # elements of a chunk in the traced case
Content = dict[tuple[int, int], int]  # (rank, chunk): how often it is in the sum


def digits(world: int) -> tuple[torch.Tensor, ...]:
    """The inputs of the traced case."""
    chunks = torch.arange(world, dtype=torch.float64).repeat_interleave(LENGTH)
    return tuple(8.0 ** (rank * world + chunks) for rank in range(world))


def content(value: float, world: int) -> Content | None:
    """What is in a sum; None for NaN, a fraction, or what is too large."""
    if not 0 <= value < 2**53 or value != int(value):
        return None
    found, place, rest = {}, 0, int(value)
    while rest:
        if rest % 8:
            found[divmod(place, world)] = rest % 8
        place, rest = place + 1, rest // 8
    return found


def in_words(found: Content | None, chunk: int) -> str:
    """ "rank 0, rank 2 twice and chunk 3 of rank 1" """
    if found is None:
        return "no sum of inputs"
    words = []
    for (rank, c), times in sorted(found.items()):
        often = "" if times == 1 else " twice" if times == 2 else f" {times} times"
        words.append(f"rank {rank}{often}" if c == chunk else f"chunk {c} of rank {rank}{often}")
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])) or "nothing"


@dataclass(frozen=True)
class Step:
    """One send, or one receive, of a whole chunk."""

    rank: int
    peer: int | None
    chunk: int | None  # which one of this rank's tensor was sent, or has changed after the receive
    content: Content | None  # what was sent; for a receive, what the changed chunk holds now
    before: Content | None = None  # for a receive: what that chunk held


@dataclass(frozen=True)
class Trace:
    """A traced case, chunk by chunk."""

    world: int
    sends: list[list[Step]]  # by rank, in order
    receives: list[list[Step]]
    end: list[list[Content | None]]  # [rank][chunk]: its first element that is not right, else its first element
    poisoned: list[tuple[int, int]]  # (rank, chunk) that hold NaN

    @property
    def whole_chunks_sent(self) -> bool:
        """Every send is one chunk."""
        return all(step.chunk is not None for steps in self.sends for step in steps)

    def right(self, chunk: int) -> Content:
        """What a finished chunk holds."""
        return {(rank, chunk): 1 for rank in range(self.world)}


def trace(e: Evidence, world: int) -> Trace | None:
    """The traced case of that world size; None when it did not run to its end."""
    numbers = e.numbers(world=world, traced=True)
    if not numbers:
        return None
    answers = e.answers[numbers[0]]
    sends, receives, end, poisoned = [], [], [], []
    for rank, answer in enumerate(answers):
        sends.append([_send(event, world) for event in answer.events if event.kind == "send"])
        receives.append([_receive(event, world) for event in answer.events if event.kind == "recv"])
        values = answer.after.tolist()
        end.append([_told(values[c * LENGTH : (c + 1) * LENGTH], c, world) for c in range(world)])
        poisoned += [(rank, place // LENGTH) for place, value in enumerate(values) if value != value]
    return Trace(world, sends, receives, end, poisoned)


def _told(values: list[float], chunk: int, world: int) -> Content | None:
    right = {(rank, chunk): 1 for rank in range(world)}
    found = [content(value, world) for value in values]
    return next((one for one in found if one != right), right)


def _send(event: Event, world: int) -> Step:
    inside = content(event.payload[0], world) if event.payload else None
    chunk = None
    if event.length == LENGTH:
        if event.offset is not None:
            chunk = event.offset // LENGTH if event.offset % LENGTH == 0 else None
        elif inside and len({c for _, c in inside}) == 1:
            chunk = next(iter(inside))[1]
    return Step(event.rank, event.peer, chunk, inside)


def _receive(event: Event, world: int) -> Step:
    if event.offset is not None:  # straight into the tensor
        changed = {event.offset // LENGTH} if event.length == LENGTH and event.offset % LENGTH == 0 else set()
    else:
        pairs = enumerate(zip(event.state, event.after, strict=True))
        changed = {place // LENGTH for place, (old, new) in pairs if old != new and not (old != old and new != new)}
    if len(changed) != 1 or event.length != LENGTH:
        return Step(event.rank, event.peer, None, None)
    chunk = changed.pop()
    now, old = event.after[chunk * LENGTH], event.state[chunk * LENGTH]
    return Step(event.rank, event.peer, chunk, content(now, world), content(old, world))


def first_wrong(e: Evidence) -> str:
    """Which ranks are in which chunk, where that is wrong first; "" when all is right."""
    for world in (4, 3, 2):
        t = trace(e, world)
        for rank, chunks in enumerate(t.end if t else ()):
            for chunk, found in enumerate(chunks):
                if found is not None and found != t.right(chunk):
                    return (
                        f"With {world} ranks, chunk {chunk} of rank {rank} should be the sum of ranks "
                        f"{{{', '.join(map(str, range(world)))}}}, and holds {in_words(found, chunk)}."
                    )
    return ""
