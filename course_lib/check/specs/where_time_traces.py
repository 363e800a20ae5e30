"""Exercise 11: traces made up afresh. A trace is a list of (rank, kind, start, end) in microseconds, in no order."""

import random
from dataclasses import dataclass, field

Trace = list[tuple[int, str, int, int]]


@dataclass
class Habits:
    """What one rank does in each step, in microseconds; forward takes a third of `compute`, backward the rest."""

    compute: int
    data: int = 0  # before forward, while nothing else happens
    pause: int = 0  # before that; nothing is recorded
    once: int = 0  # a pause in the first step only
    loader: int = 0  # data that a worker loads while the rank is in forward and backward
    tail: int = 0  # data that a worker loads from just before the end of backward on, into the communication
    update: int = 400  # the optimizer


@dataclass
class _Maker:
    rng: random.Random
    spans: Trace = field(default_factory=list)

    def put(self, rank: int, kind: str, start: int, length: int) -> int:
        """Add a span, unless it is empty; returns its end."""
        if length > 0:
            self.spans.append((rank, kind, start, start + length))
        return start + length

    def about(self, length: int) -> int:
        """The length, 2 % more or less."""
        return round(length * self.rng.uniform(0.98, 1.02))

    def compute(self, rank: int, habits: Habits, at: int) -> tuple[int, int]:
        """Pause, data, forward and backward of a step from `at` on; returns when backward begins and ends."""
        at = self.put(rank, "data", at + habits.pause, self.about(habits.data))
        forward = self.about(habits.compute // 3)
        self.put(rank, "data", at + forward // 8, habits.loader)
        self.put(rank, "forward", at + forward // 5, forward // 3)  # an operator inside of another
        begin = self.put(rank, "forward", at, forward) + self.rng.randint(20, 90)
        backward = self.about(habits.compute - habits.compute // 3)
        self.put(rank, "backward", begin, backward * 19 // 20)
        end = self.put(rank, "backward", begin + backward // 2, backward - backward // 2)  # on a second stream
        self.put(rank, "data", end - habits.tail // 3, habits.tail)
        return begin, end


def trace(rng: random.Random, ranks: dict[int, Habits], moves: list[int], steps: int = 1) -> Trace:
    """Steps of some ranks: their buckets are handed over during backward and move one after the other.

    moves  microseconds that each bucket needs when all ranks have handed it over
    """
    maker, free = _Maker(rng), 0
    clock = {rank: rng.randint(2_000_000, 9_000_000) for rank in list(ranks)[:1]}
    clock = {rank: min(clock.values()) + rng.randint(0, 60) for rank in ranks}
    for step in range(steps):
        late = {rank: habits.once if step == 0 else 0 for rank, habits in ranks.items()}
        backwards = {rank: maker.compute(rank, habits, clock[rank] + late[rank]) for rank, habits in ranks.items()}
        done = {rank: end for rank, (_, end) in backwards.items()}
        for number, length in enumerate(moves, 1):
            part = 0.9 * number / len(moves)  # of backward: after the last bucket there is still something to compute
            handed = {r: begin + round((end - begin) * part) for r, (begin, end) in backwards.items()}
            free = max(free, *handed.values()) + maker.about(length)
            for rank, start in handed.items():
                maker.put(rank, "communication", start, free - start)
                done[rank] = free
        for rank, habits in ranks.items():
            at = max(done[rank], backwards[rank][1]) + rng.randint(20, 90)
            clock[rank] = maker.put(rank, "optimizer", at, maker.about(habits.update)) + rng.randint(10, 40)
    rng.shuffle(maker.spans)
    return maker.spans


def brief(spans: Trace) -> str:
    """A trace in a few words."""
    ranks = sorted({rank for rank, *_ in spans})
    return f"a trace of {len(spans)} spans, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
