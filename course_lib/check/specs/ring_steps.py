"""Mistakes of the ring that show in its steps: which chunk goes where, and what is done with what arrives.

For a ring that sends to the right (d = 1) or to the left (d = -1), step s on rank r, up to a shift k that all share:
reduce-scatter sends chunk r - d*s + k and adds into r - d*(s+1) + k; all-gather sends r + d*(1-s) + k and stores into
r - d*s + k, all modulo N.
"""

from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.ring_trace import Step, Trace, in_words, trace


def _longest(e: Evidence) -> Trace | None:
    """The trace with most ranks, if there is one with 3 or more: with 2, left and right are the same."""
    return trace(e, 4) or trace(e, 3)


def _steps(e: Evidence) -> tuple[Trace, list[list[Step]], list[list[Step]]] | None:
    """The trace, sends and receives, if every rank made 2(N-1) of each."""
    t = _longest(e)
    if t is None or any(len(steps) != 2 * (t.world - 1) for steps in (*t.sends, *t.receives)):
        return None
    return t, t.sends, t.receives


def off_by_one_step(e: Evidence, wrong: Wrong) -> str | None:
    t = _longest(e)
    if t is None or any(step.chunk is None for steps in t.sends for step in steps):
        return None
    counts, wanted = {len(steps) for steps in t.sends}, 2 * (t.world - 1)
    if len(counts) != 1 or not 0 < abs((count := counts.pop()) - wanted) <= 2:
        return None
    return (
        f"Each of {t.world} ranks sent {count} messages; {wanted} are needed. Each phase has N - 1 = {t.world - 1} "
        "steps: range(world_size - 1), in both."
    )


def replaces_instead_of_adds(e: Evidence, wrong: Wrong) -> str | None:
    found = _steps(e)
    if found is None:
        return None
    t, _, receives = found
    first = [step for steps in receives for step in steps[: t.world - 1]]
    if not all(step.content is not None and sum(step.content.values()) == 1 for step in first):
        return None
    step = receives[0][0]
    return (
        f"Reduce-scatter, step = 0: rank 0 put what came from rank {step.peer} in the place of its own chunk "
        f"{step.chunk}. In this phase add it: receive into a buffer, then chunk += buffer."
    )


def _direction(t: Trace) -> int:
    return 1 if t.sends[0][0].peer == 1 % t.world else -1


def _shift(t: Trace, d: int) -> int:
    """The k with which the reduce-scatter agrees best; 0, as the lesson has it, if several do."""

    def faults(k: int) -> int:
        return sum(
            (step.chunk != (r - d * s + k) % t.world) + (got.chunk != (r - d * (s + 1) + k) % t.world)
            for r in range(t.world)
            for s, (step, got) in enumerate(zip(t.sends[r][: t.world - 1], t.receives[r], strict=False))
        )

    return min(range(t.world), key=faults)


def wrong_chunk_reduce_scatter(e: Evidence, wrong: Wrong) -> str | None:
    found = _steps(e)
    if found is None:
        return None
    t, sends, receives = found
    n, d = t.world, _direction(t)
    k = _shift(t, d)
    for s in range(n - 1):
        for r in range(n):
            want, into = (r - d * s + k) % n, (r - d * (s + 1) + k) % n
            sent, got = sends[r][s], receives[r][s]
            if sent.chunk is not None and sent.chunk != want:
                return (
                    f"Reduce-scatter, step = {s}: rank {r} sent chunk {sent.chunk}, and should send chunk {want}"
                    f"{_formula('(rank - step) % N', d, k)}{_passes_on(s)}."
                )
            if got.chunk is not None and got.chunk != into:
                return (
                    f"Reduce-scatter, step = {s}: rank {r} added what came into its chunk {got.chunk}; it should "
                    f"add it into chunk {into}{_formula('(rank - step - 1) % N', d, k)}, which its neighbour sent."
                )
    return None


def wrong_chunk_all_gather(e: Evidence, wrong: Wrong) -> str | None:
    found = _steps(e)
    if found is None:
        return None
    t, sends, receives = found
    n, d = t.world, _direction(t)
    k = _shift(t, d)
    for s in range(n - 1):
        for r in range(n):
            want, into = (r + d * (1 - s) + k) % n, (r - d * s + k) % n
            sent, got = sends[r][n - 1 + s], receives[r][n - 1 + s]
            if sent.chunk is not None and sent.chunk != want:
                why = "the one that has just come" if s else "the one that it has finished"
                return (
                    f"All-gather, step = {s}: rank {r} sent chunk {sent.chunk}, which holds "
                    f"{in_words(sent.content, sent.chunk)}; it should send chunk {want}"
                    f"{_formula('(rank + 1 - step) % N', d, k)}: {why}."
                )
            if got.chunk is not None and got.chunk != into:
                return (
                    f"All-gather, step = {s}: rank {r} put what came into its chunk {got.chunk}; it should put "
                    f"it into chunk {into}{_formula('(rank - step) % N', d, k)}, which its neighbour sent."
                )
    return None


def adds_in_second_phase(e: Evidence, wrong: Wrong) -> str | None:
    found = _steps(e)
    if found is None:
        return None
    t, _, receives = found
    for r in range(t.world):
        for s, step in enumerate(receives[r][t.world - 1 :]):
            if step.content and max(step.content.values()) > 1:
                return (
                    f"All-gather, step = {s}: rank {r} added the finished chunk {step.chunk} to its own part of it, "
                    "which is in there already. In this phase copy what arrives."
                )
    return None


def _formula(text: str, d: int, k: int) -> str:
    return f" = {text}" if d == 1 and k == 0 else ""


def _passes_on(step: int) -> str:
    return ": the one into which it has just added" if step else ""
