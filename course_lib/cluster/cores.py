"""How many cores may be used, and how many threads each rank will take."""

import math
import os
from pathlib import Path

import psutil

from course_lib.cluster.finding import Finding, note, ok, problem

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # containers: "200000 100000" means two cores


def cores() -> int:
    """Cores that this process may use: affinity (Slurm, taskset) and the container's quota count."""
    allowed = getattr(psutil.Process(), "cpu_affinity", None)  # not on macOS
    found = len(allowed()) if allowed else os.cpu_count() or 1
    if _QUOTA.is_file():
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            found = min(found, max(1, math.ceil(int(quota) / int(period))))
    return found


def threads(number: int | None = None, setting: str | None = None) -> Finding:
    """OMP_NUM_THREADS is the number of threads in *each* rank, so it multiplies."""
    number = number or cores()
    setting = os.environ.get("OMP_NUM_THREADS") if setting is None else setting
    many = f"{number} core{'s' if number > 1 else ''}"
    if not setting:
        text = f"{many}; OMP_NUM_THREADS is not set, so torchrun gives each of several ranks one thread."
        return ok("cores and threads", text)
    if not setting.isdigit() or int(setting) < 1:
        text = f"OMP_NUM_THREADS is {setting!r}, which is not a number of threads."
        return problem("cores and threads", text, "unset OMP_NUM_THREADS, or export OMP_NUM_THREADS=1.")
    each = int(setting)
    if each > 1 and 2 * each > number:
        text = f"{many}, but with OMP_NUM_THREADS={each} 2 ranks run {2 * each} threads and hinder each other."
        return note("cores and threads", text, "export OMP_NUM_THREADS=1.")
    return ok("cores and threads", f"{many}; OMP_NUM_THREADS={each}: each rank computes with {each}.")
