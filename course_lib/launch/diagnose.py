"""What is known of each rank when a run ends, in words, and which one was to blame."""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.launch import trace
from course_lib.launch.trace import Blocked, Reader

# What a rank sees when somebody else has failed; never the cause.
_VICTIM = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Timed out waiting|Read error|Write error|"
    r"failed to (connect|recv)|Socket (closed|Timeout)|connection was likely closed|DistNetworkError|"
    r"has closed its connection",  # the course's own transports
    re.IGNORECASE,
)
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
SENDS, RECEIVES = {"send", "isend"}, {"recv", "irecv"}


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
            and self.error["in_library"]
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
        link = "to" if blocked.op in SENDS or blocked.op.startswith("send") else "from"
        return f"waits in {blocked.op} {link} rank {blocked.peer} ({blocked.where})"
    return f"waits in {blocked.op} ({blocked.where})"


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
        state = RankState(reader.rank, state=reader.header().state, blocked=reader.blocked())
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
