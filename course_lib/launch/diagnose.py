"""What went wrong in a run, in words: the culprit first, then one line for each other rank."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.launch import trace
from course_lib.launch.result import Message
from course_lib.launch.trace import Blocked, Reader

# What a rank sees when somebody else has failed; never the cause.
_VICTIM = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Timed out waiting|Read error|Write error|"
    r"failed to (connect|recv)|Socket (closed|Timeout)|connection was likely closed|DistNetworkError",
    re.IGNORECASE,
)
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_SENDS, _RECEIVES = {"send", "isend"}, {"recv", "irecv"}


@dataclass
class RankState:
    """What is known of one rank when the run ended."""

    rank: int
    state: int = trace.STARTING
    blocked: Blocked | None = None
    error: dict | None = None  # type, message, time, frames
    exit_code: int | None = None  # None while it lives
    dead: bool = False
    stack: list[str] = field(default_factory=list)  # "Cell In[2], line 5", innermost first
    begun: dict = field(default_factory=dict)  # collectives that it has called, by group

    @property
    def victim(self) -> bool:
        """Its error only tells that another rank went away."""
        return (
            self.error is not None
            and self.error["in_torch"]
            and bool(_VICTIM.search(f"{self.error['type']}: {self.error['message']}"))
        )

    def words(self) -> str:
        """One line: finished, raised, died, or where it waits and for whom."""
        if self.state == trace.RETURNED:
            return "returned"
        if self.error:
            at = f" ({self.error['frames'][-1]['where']})" if self.error["frames"] else ""
            first = (self.error["message"].strip().splitlines() or [""])[0]
            if self.victim:
                return f"lost its connection to a rank that had gone{at}"
            return f"raised {self.error['type']}: {first}{at}"
        by_torchrun = self.exit_code in (None, -15)  # once one rank has died, torchrun ends the others
        if self.dead and not by_torchrun:
            return self.death()
        if self.blocked:
            return waits(self.blocked)
        if self.dead:
            return f"was ended by torchrun ({self.stack[0]})" if self.stack else "was ended by torchrun"
        if self.state == trace.STARTING:
            return "was still starting"
        return f"was computing ({self.stack[0]})" if self.stack else "was computing"

    def death(self) -> str:
        """How the process ended, without an exception."""
        at = f" at {self.stack[0]}" if self.stack else f" at {self.blocked.where}" if self.blocked else ""
        code = self.exit_code
        if code is not None and code < 0:
            name = _SIGNALS.get(-code, f"signal {-code}")
            why = {
                9: " (kill -9 from outside, or the machine ran out of memory)",
                6: " (a C++ library gave up: with gloo mostly because the ranks called different collectives)",
                11: " (a crash in compiled code)",
            }.get(-code, "")
            return f"was killed by {name}{at}{why}"
        if code is None:
            return f"vanished{at}"
        return (
            f"left with exit code {code} before it had returned a value{at} "
            "(os._exit, or a library that ends the process)"
        )


def waits(blocked: Blocked) -> str:
    """ "waits in send to rank 1 (Cell In[5], line 7)"."""
    if blocked.peer is not None and blocked.op in trace.POINT_TO_POINT:
        link = "to" if blocked.op in _SENDS or blocked.op.startswith("send") else "from"
        return f"waits in {blocked.op} {link} rank {blocked.peer} ({blocked.where})"
    return f"waits in {blocked.op} ({blocked.where})"


def explain_hang(states: list[RankState], messages: Sequence[Message] = ()) -> str:
    """Why nobody can go on: the circle, or the rank for which the others wait in vain."""
    for state in states:
        chain, rank = [], state.rank
        while rank not in chain and (nxt := _waits_for(states, rank)) is not None:
            chain.append(rank)
            rank = nxt
        if rank in chain:
            return _circle([states[k] for k in chain[chain.index(rank) :]])
        if chain and not states[rank].blocked:
            return _dead_end(states[chain[-1]], states[rank], messages)
    if all(state.blocked or state.state == trace.RETURNED for state in states):
        return "Each rank waits in a call that no other rank answers; the lines below say where."
    return "No rank waits for another one: the time was too short, or a rank computes for ever."


def _circle(states: list[RankState]) -> str:
    arrows = " → ".join(str(s.rank) for s in [*states, states[0]])
    ops = {s.blocked.op for s in states}
    if ops <= _SENDS:
        return f"A circle, rank {arrows}: everybody sends and nobody receives."
    if ops <= _RECEIVES:
        return f"A circle, rank {arrows}: everybody waits to receive and nobody sends."
    return f"A circle, rank {arrows}: each waits for the next one."


def _dead_end(waiting: RankState, other: RankState, messages: Sequence[Message]) -> str:
    told = f"rank {waiting.rank} {waits(waiting.blocked)}"
    for m in messages:
        if (m.rank, m.op, m.peer, m.end) == (other.rank, "isend", waiting.rank, None):
            return (
                f"{told}; rank {other.rank} has called isend to it ({m.where}) but never wait() on what isend "
                "returned: only then is a message sure to have left."
            )
    if waiting.blocked.op not in trace.POINT_TO_POINT:
        missing, missed = "call it", "calling it"
    elif waiting.blocked.op in _SENDS or waiting.blocked.op.startswith("send"):
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


def culprit(states: list[RankState]) -> RankState | None:
    """The earliest error that is not somebody else's, else a process that died, else nobody."""
    errors = sorted((s for s in states if s.error and not s.victim), key=lambda s: s.error["time"])
    if errors:
        return errors[0]
    dead = [s for s in states if s.dead and not s.error and s.state != trace.RETURNED]
    # torchrun ends the others by SIGTERM once one has died, so a SIGTERM comes second
    return min(dead, key=lambda s: (s.exit_code in (None, -15), s.rank), default=None)


def read_states(folder: Path, readers: list[Reader], exit_codes: dict[int, int | None]) -> list[RankState]:
    """Put together what the run folder tells. `exit_codes`: of the ranks that have died."""
    states = []
    for reader in readers:
        state = RankState(reader.rank, state=reader.header()[0], blocked=reader.blocked())
        state.begun = reader.collectives()
        error = folder / f"rank_{reader.rank}.error"
        if error.exists():
            state.error = json.loads(error.read_text())
        state.dead = reader.rank in exit_codes
        state.exit_code = exit_codes.get(reader.rank)
        state.stack = read_stack(folder / f"rank_{reader.rank}.stack", folder)
        states.append(state)
    return states


def read_stack(path: Path, folder: Path) -> list[str]:
    """The learner's lines in the last stack that faulthandler wrote, innermost first."""
    if not path.exists():
        return []
    cells = json.loads((folder / "plan.json").read_text())["cells"]
    text = path.read_text(errors="replace")
    last = re.split(r"^(?:Current thread|Thread|Fatal Python error|Stack)", text, flags=re.MULTILINE)[-1]
    found = re.findall(r'File "(.*)", line (\d+) in', last)
    hidden = (str(Path(__file__).parent), "<frozen", sys.prefix, sys.base_prefix)
    return [f"{cells.get(f) or Path(f).name}, line {n}" for f, n in found if not f.startswith(hidden)]
