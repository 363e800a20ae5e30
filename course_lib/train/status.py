"""status.json: running, finished, stopped or failed, and why. Whether a run was a success is judged by it."""

import fcntl
import json
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_lib.train.errors import CannotWrite
from course_lib.train.folder import write_json

# What a rank says when another one has left or does not come: a consequence, never the cause.
# Whole phrases: a bare "store" is in "restore", in ".DS_Store" and in many a path.
_CONSEQUENCE = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|timed out (after|waiting)|wait timeout after"
    r"|application timeout|broken pipe|gloo/(transport|rendezvous)|\bgloo connectFullMesh|monitoredBarrier"
    r"|\bNCCL (error|operation|communicator)|\bTCPStore\b|^Dist(Store|Network|Backend)Error\b",
    re.I,
)


def write_status(folder: Path, status: str, why: str = "", **more: Any) -> None:
    """Say how the run is; `more` are further entries (step, steps, epoch, data, note, ...)."""
    write_json(
        folder / "status.json",
        {"status": status, "why": why, "time": time.time(), "pid": os.getpid(), **more},
    )


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; an empty dict when there is none, status "unknown" when it cannot be read."""
    try:
        details = json.loads((folder / "status.json").read_text())
        return {**details, "status": str(details["status"]), "why": str(details.get("why", ""))}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"status": "unknown", "why": "status.json cannot be read"}


def outcome(details: dict[str, Any], at_work: Callable[[], bool]) -> tuple[str, str]:
    """The status of a launch and why, from what status.json says: the one place where "killed" is found.

    `at_work` tells whether some process holds the folder's lock; it is asked only when status.json says "running".

    >>> outcome({"status": "running", "why": ""}, at_work=lambda: False)[0]
    'killed'
    """
    status, why = details.get("status", "running"), details.get("why", "")
    if status == "running" and not at_work():
        return "killed", "the processes ended without a word, by kill -9 or for lack of memory"
    return status, why


def is_consequence(error: BaseException) -> bool:
    """Whether this error only reports that another rank is gone.

    >>> is_consequence(RuntimeError("Connection closed by peer [127.0.0.1]:2791"))
    True
    >>> is_consequence(ValueError("bad sample"))
    False
    >>> is_consequence(RuntimeError("cannot restore the optimizer"))
    False
    """
    if not isinstance(error, (RuntimeError, OSError)) or getattr(error, "filename", None) is not None:
        return False  # an error about a file has its own reason
    return bool(_CONSEQUENCE.search(f"{type(error).__name__}: {error}"))


def report_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Called by every rank that fails, the first real error wins: consequences never overwrite a cause.

    Ranks on other machines do so too when they see the folder; if they do not, their own output has the
    traceback.
    """
    if not (folder / "config.json").exists():
        return
    with (folder / ".status-lock").open("a") as guard:
        fcntl.lockf(guard, fcntl.LOCK_EX)  # held for the few lines below by one rank at a time
        known = read_status(folder)
        consequence = is_consequence(error)
        if known.get("status") == "failed" and (consequence or not known.get("consequence")):
            return
        message = " ".join(str(error).split()) or "no message"
        why = message if isinstance(error, CannotWrite) else f"rank {rank} raised {type(error).__name__}: {message}"
        if consequence:
            why = f"rank {rank} lost the connection to another rank, which died or hangs: {message}"
        text = "".join(traceback.format_exception(error))
        kept = {key: value for key, value in known.items() if key not in ("status", "why", "time", "pid")}
        write_status(folder, "failed", why, **kept | {"rank": rank, "traceback": text, "consequence": consequence})
