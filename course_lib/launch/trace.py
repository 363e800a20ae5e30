"""What a rank does, written where another process can read it even after the rank has died.

Each rank owns one memory-mapped file: a header (state, what it is blocked in) and a table of calls of
torch.distributed. Writing is a memory write, so a rank that hangs, is killed, or holds the GIL leaves its record.
"""

import json
import mmap
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from course_lib.launch.result import Message

STARTING, RUNNING, RETURNED, RAISED = range(4)
OPS = [
    "send",
    "recv",
    "isend",
    "irecv",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "all_gather_single",
    "gather_single",
    "gather_into_tensor",
    "reduce_scatter_single",
    "all_reduce_coalesced",
    "all_gather_coalesced",
]
CAPACITY = 1 << 17  # calls a rank; the file is sparse, so unused rows cost nothing
_HEADER = struct.Struct("<IIIiiddI")  # as Header below
_CALL = struct.Struct("<HHiiIQddII")  # op, done, peer, tag, group, bytes, start, end, where, number in its group
_ROOM = 64


class Header(NamedTuple):
    """What a rank says of itself; times are those of time.monotonic()."""

    state: int = STARTING
    calls: int = 0
    dropped: int = 0  # calls that the table had no room for
    row: int = -1  # the call that the rank waits in; -1: none
    where: int = -1
    begin: float = 0.0  # of the function
    end: float = 0.0
    threads: int = 1  # Python threads of the rank when it began to wait


class Writer:
    """The rank's side."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"rank_{rank}.trace"
        self._file = path.open("w+b")
        self._file.truncate(_ROOM + CAPACITY * _CALL.size)
        self._map = mmap.mmap(self._file.fileno(), 0)
        if hasattr(mmap, "MADV_RANDOM"):  # else the system reads ahead, in a file that is nearly all holes
            self._map.madvise(mmap.MADV_RANDOM)
        self._names = (folder / f"rank_{rank}.names").open("w", buffering=1)
        self._known: dict[tuple, int] = {}
        self._lock = threading.Lock()
        self._header = [*Header()]
        self._write_header()

    def _write_header(self) -> None:
        _HEADER.pack_into(self._map, 0, *self._header)

    def name(self, kind: str, value: object) -> int:
        """Number of a place in the source or of a group; told to the reader once."""
        key = (kind, tuple(value) if isinstance(value, list) else value)
        with self._lock:
            if key not in self._known:
                self._names.write(json.dumps({kind: value}) + "\n")
                self._known[key] = len(self._known)
            return self._known[key]

    def state(self, state: int, *, begin: float | None = None, end: float | None = None) -> None:
        """Say where the rank is in its life."""
        self._header[0] = state
        self._header[5] = self._header[5] if begin is None else begin
        self._header[6] = self._header[6] if end is None else end
        self._write_header()

    def start(self, op: int, peer: int, tag: int, group: int, nbytes: int, now: float, where: int, seq: int) -> int:
        """Note that a call begins; returns its row, or -1 when the table is full."""
        with self._lock:
            row = self._header[1]
            if row == CAPACITY:
                self._header[2] += 1
                return -1
            _CALL.pack_into(self._map, _ROOM + row * _CALL.size, op, 0, peer, tag, group, nbytes, now, 0.0, where, seq)
            self._header[1] = row + 1
            self._write_header()
            return row

    def blocked(self, row: int, where: int) -> None:
        """The rank now waits in that row's call."""
        with self._lock:
            self._header[3:5] = row, where
            self._header[7] = threading.active_count()
            self._write_header()

    def done(self, row: int, now: float, peer: int | None = None) -> None:
        """The call of that row has completed."""
        if row < 0:
            return
        values = list(_CALL.unpack_from(self._map, _ROOM + row * _CALL.size))
        if not values[1]:
            values[1], values[7] = 1, now
            values[2] = values[2] if peer is None else peer
            _CALL.pack_into(self._map, _ROOM + row * _CALL.size, *values)
        if self._header[3] == row:
            self.blocked(-1, -1)


@dataclass(frozen=True)
class Blocked:
    """The call that a rank waits in."""

    op: str
    peer: int | None
    where: str
    ranks: tuple[int, ...]
    number: int  # how many collectives of this group came before it
    tag: int = 0  # of a send or receive


class Reader:
    """The supervisor's side: reads while the rank runs and after it has died."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._path = folder / f"rank_{rank}.trace"
        self._names_path = folder / f"rank_{rank}.names"
        self._map: mmap.mmap | None = None
        self._names: list[dict] = []

    def header(self) -> Header:
        """What the rank says of itself now."""
        if self._map is None:
            try:
                with self._path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # not there yet, or still empty
                return Header()
        return Header(*_HEADER.unpack_from(self._map, 0))

    def _name(self, number: int) -> dict:
        if number >= len(self._names):
            lines = self._names_path.read_text().splitlines() if self._names_path.exists() else []
            self._names = [json.loads(line) for line in lines]
        return self._names[number] if number < len(self._names) else {}

    def _row(self, row: int) -> tuple:
        return _CALL.unpack_from(self._map, _ROOM + row * _CALL.size)

    def blocked(self) -> Blocked | None:
        """What the rank waits in now (or waited in when it died)."""
        header = self.header()
        row, where = header.row, header.where
        if not 0 <= row < header.calls:
            return None
        op, _, peer, tag, group, _, _, _, _, number = self._row(row)
        ranks = tuple(self._name(group).get("group", ()))
        return Blocked(OPS[op], peer if peer >= 0 else None, self._name(where).get("where", "?"), ranks, number, tag)

    def collectives(self) -> dict[tuple[int, ...], list[Message]]:
        """The collectives that the rank has begun, in order, by group."""
        found: dict[tuple[int, ...], list[Message]] = {}
        for message in self.messages(0.0):
            if message.op not in POINT_TO_POINT:
                found.setdefault(message.ranks, []).append(message)
        return found

    def messages(self, zero: float) -> list[Message]:
        """All calls, with times in seconds after `zero`."""
        found = []
        for row in range(self.header().calls):
            op, done, peer, tag, group, nbytes, start, end, where, _ = self._row(row)
            found.append(
                Message(
                    rank=self.rank,
                    op=OPS[op],
                    peer=peer if peer >= 0 else None,
                    nbytes=nbytes,
                    start=start - zero,
                    end=end - zero if done else None,
                    where=self._name(where).get("where", "?"),
                    tag=tag,
                    ranks=tuple(self._name(group).get("group", ())),
                )
            )
        return found

    def close(self) -> None:
        """Let go of the file."""
        if self._map is not None:
            self._map.close()
            self._map = None


POINT_TO_POINT = {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list"}
