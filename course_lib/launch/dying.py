"""Nobody outlives the one who started it: what the operating system offers for that."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when the thread that forked it ends. `parent`: its pid, against the race."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the new parent of every descendant whose own parent dies (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
