"""How many ranks fit into the memory that is free."""

from pathlib import Path

import psutil

from course_lib.cluster.finding import Finding, note, ok, problem

WANTED = 4  # ranks in most lessons; some show 8
_GROUP = Path("/sys/fs/cgroup")
_CURE = "close other programs, shut down idle notebooks (JupyterLab: Running), or give the container more memory."


def free_bytes() -> int:
    """Memory that new processes can get: what the system has left, or what the container's limit leaves."""
    free = psutil.virtual_memory().available
    limit, used = _GROUP / "memory.max", _GROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        cached = int(stat.get("inactive_file", 0))  # file cache: given back when asked for
        free = min(free, int(text) - int(used.read_text()) + cached)
    return max(free, 0)


def ranks_that_fit(rank_bytes: int, free: int | None = None) -> int:
    """How many processes of `rank_bytes` fit, with a tenth of the free memory left over."""
    return int(0.9 * (free_bytes() if free is None else free) // rank_bytes)


def memory(rank_bytes: int, free: int | None = None) -> Finding:
    """`rank_bytes` is what one rank was measured to need (see probe)."""
    free = free_bytes() if free is None else free
    fit = ranks_that_fit(rank_bytes, free)
    need = f"a rank that trains needs {rank_bytes / 1e9:.2f} GB (measured)"
    text = f"{free / 1e9:.1f} GB are free and {need}: {fit} fit"
    if fit < 2:
        return problem("memory", text + ", and the course needs at least 2.", _CURE)
    if fit < WANTED:
        return note("memory", text + f"; most lessons start {WANTED}.", _CURE)
    return ok("memory", text + ".")
