"""The processes of a run that goes on, found from its folder; and how to kill one, to see what happens then."""

from pathlib import Path

import psutil

from course_lib.train.folder import is_locked
from course_lib.train.status import read_status


def ranks_of(folder: Path) -> list[psutil.Process]:
    """The ranks on this machine, in the order of their numbers; [] while none of them trains.

    status.json has the process of rank 0. Its parent is torchrun, whose children are the ranks, started in order.
    """
    try:
        pid = read_status(folder).get("pid") if is_locked(folder) else None
        if pid is None:
            return []
        return ranks_under(psutil.Process(pid).parent())
    except (psutil.Error, AttributeError, ValueError):  # gone in this very moment; no parent; a half-written file
        return []


def ranks_under(torchrun: psutil.Process) -> list[psutil.Process]:
    """The ranks that a torchrun has started, in the order of their numbers."""
    mine = [c for c in torchrun.children() if not any("resource_tracker" in word for word in c.cmdline())]
    return sorted(mine, key=lambda child: (child.create_time(), child.pid))


def kill_rank(folder: Path, rank: int) -> bool:
    """Send SIGKILL to a rank, which cannot be caught; whether it was there."""
    found = ranks_of(folder)
    if rank >= len(found):
        return False
    try:
        found[rank].kill()
    except psutil.NoSuchProcess:
        return False
    return True
