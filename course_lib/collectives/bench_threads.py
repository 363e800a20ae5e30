"""`course bench ring --threads`: which thread of a rank the CPU time of an all-reduce goes to. Linux only."""

import os
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from course_lib.collectives.bench_measure import calls_in_block, ways_to_reduce, words
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport

OWN = "the rank's own thread"
Times = dict[str, float]  # thread name: CPU-seconds a call


def cpu_by_thread(sizes: list[int]) -> dict[int, dict[str, Times]]:
    """In a rank: for each size and contender the CPU time of each kind of thread, on average over some blocks."""
    found: dict[int, dict[str, Times]] = {}
    with TcpTransport() as tcp, SharedTransport() as shared:
        for size in sizes:
            found[size] = {}
            for name, call in ways_to_reduce(size // 4, tcp, shared)[0].items():
                times = 4 * calls_in_block(size)
                call()
                dist.barrier()
                before = _now()
                for _ in range(times):
                    call()
                after = _now()
                found[size][name] = {thread: (cpu - before.get(thread, 0.0)) / times for thread, cpu in after.items()}
    return found


def _now() -> Times:
    """CPU-seconds of this process so far, by the name of the thread; the numbers at the end of names are dropped."""
    found: Times = defaultdict(float)
    for folder in Path("/proc/self/task").iterdir():
        name = OWN if folder.name == str(os.getpid()) else (folder / "comm").read_text().strip().rstrip("0123456789")
        found[name] += int((folder / "schedstat").read_text().split()[0]) / 1e9
    return found


def table(ranks: int, found: dict[int, dict[str, Times]]) -> str:
    """Microseconds a call; threads that took less than one are left out."""
    lines = [f"CPU time of rank 0 of {ranks} for each all-reduce, by thread"]
    for size, contenders in found.items():
        for name, times in contenders.items():
            parts = [f"{thread} {cpu * 1e6:.0f} µs" for thread, cpu in sorted(times.items(), key=lambda item: -item[1])
                     if cpu >= 1e-6]  # fmt: skip
            lines.append(f"{words(size):>7}  {name:<18} {', '.join(parts)}")
    return "\n".join(lines)
