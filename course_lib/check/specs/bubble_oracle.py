"""Exercise 12: how long the stages of a pipeline wait, from end to end of its ops: a simulation by events."""

import heapq
from collections.abc import Sequence

Schedule = Sequence[Sequence[tuple[str, int]]]  # of each stage: (kind, microbatch) in its order


def waiting(schedule: Schedule, forward: Sequence[int], backward: Sequence[int]) -> float:
    """The part of the time in which stages wait, from the start to the last end, over all stages."""
    stages, place, done = len(schedule), [0] * len(schedule), set()
    running: list[tuple[int, int]] = []  # (end, stage)
    busy = [False] * stages
    waited = now = 0

    def start(stage: int) -> None:
        if 0 <= stage < stages and not busy[stage] and place[stage] < len(schedule[stage]):
            kind, microbatch = schedule[stage][place[stage]]
            neighbour = stage - 1 if kind == "forward" else stage + 1
            if not 0 <= neighbour < stages or (neighbour, kind, microbatch) in done:
                busy[stage] = True
                heapq.heappush(running, (now + (forward if kind == "forward" else backward)[stage], stage))

    for stage in range(stages):
        start(stage)
    while running:
        end, stage = heapq.heappop(running)
        waited += (stages - sum(busy)) * (end - now)
        now, busy[stage] = end, False
        done.add((stage, *schedule[stage][place[stage]]))
        place[stage] += 1
        for neighbour in (stage, stage - 1, stage + 1):
            start(neighbour)
    if any(at < len(ops) for at, ops in zip(place, schedule, strict=True)):
        raise ValueError("the stages of this schedule wait for each other for ever")
    return waited / (stages * now)
