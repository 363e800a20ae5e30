"""`course bench launch`: how long until ranks have answered, and until all of them are gone, beside plain torchrun."""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from course_lib.launch.notebook_run import run
from course_lib.launch.supervise import can_fork, supervisor

_SCRIPT = """
import pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([dist.get_rank()])
dist.all_reduce(x)
pathlib.Path(sys.argv[1], str(dist.get_rank())).write_text(str(x.item()))
dist.barrier()
dist.destroy_process_group()
"""


def _sum_of_ranks() -> int:
    x = torch.tensor([dist.get_rank()])
    dist.all_reduce(x)
    return x.item()


def _right(values: list[int], ranks: int) -> None:
    if values != [ranks * (ranks - 1) // 2] * ranks:
        raise RuntimeError(f"wrong sums of {ranks} ranks: {values}")


def time_run(ranks: int, start: str) -> tuple[float, float, float]:
    """(seconds to the results, seconds until all processes are gone, CPU-seconds) of one `run`."""
    agent = psutil.Process(supervisor()._process.pid)
    before, began = agent.cpu_times(), time.perf_counter()
    result = run(_sum_of_ranks, ranks, quiet=True, start=start)
    answered = time.perf_counter() - began
    _right(result.results, ranks)
    while agent.children(recursive=True):
        time.sleep(0.002)
    gone, after = time.perf_counter() - began, agent.cpu_times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return answered, gone, cpu


def time_torchrun(ranks: int) -> tuple[float, float, float]:
    """The same three figures for `torchrun --standalone script.py`."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(_SCRIPT)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(
            [*command, str(script), folder],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        answers = [Path(folder, str(rank)) for rank in range(ranks)]
        while not all(answer.exists() and answer.read_text() for answer in answers):
            if process.poll() is not None:
                raise RuntimeError(f"torchrun ended with exit code {process.returncode}")
            time.sleep(0.005)
        answered = time.perf_counter() - began
        process.wait(120)
        gone, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        _right([int(answer.read_text()) for answer in answers], ranks)
    return answered, gone, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _table(rows: list[tuple]) -> None:
    print(f"{'ranks':>5}  {'start':<22}{'to results, s':>22}{'to all gone, s':>22}{'CPU-s':>8}{'faster':>9}")
    for ranks, name, times, factor in rows:
        cells = []
        for column in range(2):
            values = sorted(t[column] for t in times)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f}–{values[-1]:.2f})")
        cpu = statistics.median(t[2] for t in times)
        print(f"{ranks:>5}  {name:<22}{cells[0]:>22}{cells[1]:>22}{cpu:>8.2f}{factor:>9}")


def bench(sizes: list[int], rounds: int, plain: bool = False) -> list[tuple]:
    """Interleave the ways to start, `rounds` times; rows of the table."""
    ways: dict[str, Callable[[int], tuple]] = {"torchrun script.py": time_torchrun}
    if plain or not can_fork():
        ways["run(start='torchrun')"] = lambda ranks: time_run(ranks, "torchrun")
    if can_fork():
        ways["run()"] = lambda ranks: time_run(ranks, "fork")
    run(_sum_of_ranks, 1, quiet=True)  # the agent's own start is not what is measured
    rows = []
    for ranks in sizes:
        times: dict[str, list] = {name: [] for name in ways}
        for number in range(rounds):
            for name, way in ways.items():
                print(f"\r{ranks} ranks, round {number + 1} of {rounds}: {name:<24}", end="", file=sys.stderr)
                times[name].append(way(ranks))
        base = statistics.median(t[0] for t in times["torchrun script.py"])
        for name, found in times.items():
            rows.append((ranks, name, found, f"{base / statistics.median(t[0] for t in found):.1f}x"))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return rows


def _unshared() -> float:
    return psutil.Process().memory_full_info().uss / 2**20


def main(argv: list[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="course bench launch", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way and size")
    parser.add_argument("--plain", action="store_true", help="measure run(start='torchrun') as well")
    parser.add_argument("--memory", action="store_true", help="print the unshared memory of an idle rank instead")
    options = parser.parse_args(argv)
    if min(options.ranks) < 1 or options.rounds < 1:
        parser.error("--ranks and --rounds take numbers from 1")
    if options.memory:
        for start in ["fork"] * can_fork() + ["torchrun"]:
            print(f"{start}: {max(run(_unshared, 2, start=start, quiet=True).results):.0f} MB a rank, not shared")
        return 0
    print(f"{psutil.cpu_count()} cores, torch {torch.__version__}; median (least–most) of {options.rounds} rounds")
    _table(bench(options.ranks, options.rounds, options.plain))
    return 0
