"""Room for run folders in the current folder, and for batches in shared memory."""

import os
import shutil
import tempfile
from pathlib import Path

from course_lib.cluster.finding import Finding, note, ok, problem

_NEED, _COMFORT = 0.5e9, 5e9  # bytes: checkpoints of the lessons; the larger data sets beside them
_SHM_COMFORT = 1e9  # bytes


def disk(folder: Path | None = None, free: int | None = None) -> Finding:
    """Runs and data are written below the folder that one works in."""
    folder = folder or Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free if free is None else free
    except OSError as error:
        text = f"nothing can be written into {folder} ({error.strerror})."
        return problem("disk", text, "work in a folder of your own, or free some space or quota.")
    text = f"{free / 1e9:.1f} GB are free in {folder}"
    if free < _NEED:
        return problem("disk", f"only {text}.", f"free at least {_NEED / 1e9:g} GB, or work on another disk.")
    if free < _COMFORT:
        return note("disk", f"{text}: enough for the lessons; Imagenette or CIFAR-10 may not fit.")
    return ok("disk", text + ".")


def shared_memory(folder: Path = Path("/dev/shm"), size: int | None = None) -> Finding:
    """DataLoader workers hand batches over through /dev/shm; Docker gives 64 MB unless told otherwise."""
    if not folder.is_dir():
        return ok("shared memory", f"this system has no {folder}; DataLoader workers use files instead.")
    usage = os.statvfs(folder)
    free = usage.f_bavail * usage.f_frsize if size is None else size
    text = f"{free / 1e9:.2f} GB are free in {folder}"
    if free >= _SHM_COMFORT:
        return ok("shared memory", text + ".")
    cure = "start the container with --ipc=host or --shm-size=8g, or train with 0 DataLoader workers."
    if free < 64e6:
        return problem("shared memory", f"only {text}: DataLoader workers will die with a bus error.", cure)
    return note("shared memory", f"{text}: little for DataLoader workers with large batches.", cure)
