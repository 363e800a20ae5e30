"""Why the ranks of a run wait for each other, in words."""

from collections.abc import Sequence

from course_lib.launch import trace
from course_lib.launch.diagnose import RECEIVES, SENDS, RankState, waits
from course_lib.launch.result import Message


def explain_hang(states: list[RankState], messages: Sequence[Message] = ()) -> str:
    """Why nobody can go on: the circle, or the rank for which the others wait in vain."""
    for state in states:
        chain, rank = [], state.rank
        while rank not in chain and (nxt := _waits_for(states, rank)) is not None:
            chain.append(rank)
            rank = nxt
        if rank in chain:
            return _circle([states[k] for k in chain[chain.index(rank) :]], messages)
        if chain and not states[rank].blocked:
            return _dead_end(states[chain[-1]], states[rank], messages)
    if all(state.blocked or state.state == trace.RETURNED for state in states):
        return "Each rank waits in a call that does not end; the lines below say where."
    return "No rank waits for another one: the time was too short, or a rank computes for ever."


def _circle(states: list[RankState], messages: Sequence[Message]) -> str:
    arrows = " → ".join(str(s.rank) for s in [*states, states[0]])
    ops = {s.blocked.op for s in states}
    if ops <= SENDS:
        return f"A circle, rank {arrows}: everybody sends and nobody receives."
    if ops <= RECEIVES:
        if missed := [text for s in states if (text := _astray(s, messages))]:
            return f"A circle, rank {arrows}: each waits for a message that does not come.\n" + "\n".join(missed)
        return f"A circle, rank {arrows}: everybody waits to receive and nobody sends."
    return f"A circle, rank {arrows}: each waits for the next one."


def _astray(waiting: RankState, messages: Sequence[Message]) -> str | None:
    """The peer has begun to send, but what it sends does not arrive here: why, in words. None when it sends nothing."""
    peer, tag = waiting.blocked.peer, waiting.blocked.tag
    under_way = [m for m in messages if m.rank == peer and m.op == "isend" and m.end is None]
    here = [m for m in messages if m.rank == waiting.rank and m.op in RECEIVES and (m.peer, m.tag) == (peer, tag)]
    sent = [m for m in messages if m.rank == peer and m.op in SENDS and (m.peer, m.tag) == (waiting.rank, tag)]
    if len(sent) >= len(here) > 0 and sent[len(here) - 1] in under_way:  # they meet: the k-th send and the k-th receive
        return _never_waited(sent[len(here) - 1])
    for m in under_way:
        if m.peer == waiting.rank and m.tag != tag:
            return (
                f"rank {peer} sends to rank {waiting.rank} with tag {m.tag} ({m.where}), "
                f"and rank {waiting.rank} receives with tag {tag}: a message and its receive need the same tag."
            )
    elsewhere = [m for m in under_way if m.peer != waiting.rank]
    if elsewhere and len(elsewhere) == len(under_way):
        m = elsewhere[0]
        return f"rank {waiting.rank} waits for rank {peer}, but rank {peer} sends to rank {m.peer} ({m.where})."
    return None


def _never_waited(m: Message) -> str:
    return (
        f"rank {m.rank} has called isend to rank {m.peer} ({m.where}) but never wait() on what isend returned: "
        "only then is a message sure to have left."
    )


def _dead_end(waiting: RankState, other: RankState, messages: Sequence[Message]) -> str:
    told = f"rank {waiting.rank} {waits(waiting.blocked)}"
    for m in messages:
        if (m.rank, m.op, m.peer, m.end) == (other.rank, "isend", waiting.rank, None):
            return f"{told}; {_never_waited(m)}"
    if waiting.blocked.op not in trace.POINT_TO_POINT:
        missing, missed = "call it", "calling it"
    elif waiting.blocked.op in SENDS or waiting.blocked.op.startswith("send"):
        missing, missed = "receive it", "receiving it"
    else:
        missing, missed = "send anything", "sending anything more"
    if other.state == trace.RETURNED:
        return f"{told}, but rank {other.rank} has returned without {missed}."
    return f"{told}, but rank {other.rank} does not {missing}: it {other.words()}."


def _waits_for(states: list[RankState], rank: int) -> int | None:
    """The rank that must act before this one can go on; None when it does not wait."""
    blocked = states[rank].blocked
    if blocked is None or states[rank].state == trace.RETURNED or states[rank].error:
        return None
    if blocked.op in trace.POINT_TO_POINT:
        return blocked.peer if blocked.peer is not None and 0 <= blocked.peer < len(states) else None
    for other in blocked.ranks:
        if other != rank and len(states[other].begun.get(blocked.ranks, ())) <= blocked.number:
            return other
    return None


def mismatch(states: list[RankState]) -> str | None:
    """Ranks of one group that met in different collectives, or with different sizes; None when all agree."""
    groups = {group for state in states for group in state.begun}
    for group in groups:
        rows = [(k, states[k].begun.get(group, [])) for k in group if k < len(states)]
        for step in range(min((len(calls) for _, calls in rows), default=0)):
            (first, a), *others = [(k, calls[step]) for k, calls in rows]
            for rank, b in others:
                same_size = a.nbytes == b.nbytes or a.op not in ("all_reduce", "broadcast", "reduce")
                if a.op != b.op or not same_size:
                    return (
                        f"collective number {step + 1} differs: rank {first} calls {a.op} with {a.nbytes} bytes "
                        f"({a.where}), rank {rank} calls {b.op} with {b.nbytes} bytes ({b.where}). "
                        "All ranks of a group must call the same collectives in the same order with equal sizes."
                    )
    return None
