"""What runs in the ranks of `course bench loop`: the contenders' runs, in blocks of steps in random order."""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from course_lib.train.bench_loop_contenders import Contender, bare, end_loss, ours
from course_lib.train.bench_loop_job import TASKS, Equal, equal_job
from course_lib.train.bench_loop_peers import PEERS
from course_lib.train.bench_loop_turns import Run

BARE, AGAIN, EACH, TENTH = "bare DDP", "bare DDP, again", "ours, a row a step", "ours, a row in 10"
OWN = {
    BARE: "the shortest loop that one writes by hand",
    AGAIN: "the same a second time (A/A): how far two equal contenders are apart",
    EACH: "course_lib.train as it is, with log_every=1, the default",
    TENTH: "the same with log_every=10",
}
CLOSE = 1e-4  # losses of equal jobs may differ by this part: sums are rounded in other orders


@dataclass(frozen=True)
class Block:
    """Seconds of one block of steps: by the clock, and of the CPU on all threads of the rank."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Found:
    """What one rank, or all together, found for one task."""

    blocks: dict[str, list[Block]]  # one for each round
    loss: dict[str, float]  # at the end, on average over the ranks
    apart: dict[str, float]  # the largest difference of a weight to that of the bare loop


def measure(tasks: list[str], names: list[str], rounds: int, steps: int) -> dict[str, Found]:
    """For each task. `steps` are timed together; 0: as many as the task says. Raises RuntimeError for unequal ends."""
    found = {}
    for task in tasks:
        block = steps or TASKS[task].steps
        with contenders(equal_job(TASKS[task], (rounds + 1) * block), names) as runs:
            blocks = alternate({name: Run(name, runs[name].train) for name in runs}, rounds, block, task)
            found[task] = Found(blocks, *ends(equal_job(TASKS[task], 1), runs))
    return found


@contextmanager
def contenders(equal: Equal, names: list[str]) -> Iterator[dict[str, Contender]]:
    """Those of the names, with run folders that are gone afterwards."""
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(equal.env.share(mine))
        (folder / "1").mkdir(exist_ok=True)
        (folder / "10").mkdir(exist_ok=True)
        ways = {
            BARE: bare, AGAIN: bare, EACH: lambda job: ours(job, folder / "1", 1),
            TENTH: lambda job: ours(job, folder / "10", 10), **PEERS,
        }  # fmt: skip
        yield {name: ways[name](equal) for name in names}
        dist.barrier()  # rank 0's folder goes when nobody needs it any more


def alternate(runs: dict[str, Run], rounds: int, steps: int, task: str) -> dict[str, list[Block]]:
    """In each round every run takes so many steps, in an order of its own that is the same on all ranks.

    A round before the first one is not counted: in it the runs set up what they need.
    """
    blocks: dict[str, list[Block]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        if dist.get_rank() == 0:
            counted = f"round {number} of {rounds}" if number else "warm-up"
            print(f"{dist.get_world_size()} ranks, {task}: {counted}", flush=True)
        for name in random.Random(number).sample(list(runs), len(runs)):
            dist.barrier()
            block = _time(runs[name], steps)
            if number:
                blocks[name].append(block)
    for run in runs.values():
        run.finish()
    return blocks


def _time(run: Run, steps: int) -> Block:
    began, cpu = time.perf_counter(), time.process_time()
    run.turn(steps)
    return Block(time.perf_counter() - began, time.process_time() - cpu)


def ends(equal: Equal, runs: dict[str, Contender]) -> tuple[dict[str, float], dict[str, float]]:
    """Losses and distances of weights at the end; raises RuntimeError when a contender did another job."""
    base = next(iter(runs.values())).module.state_dict()
    losses, apart = {}, {}
    for name, run in runs.items():
        loss = end_loss(equal, run.module)
        dist.all_reduce(loss)
        losses[name] = loss.item() / equal.env.world_size
        now = run.module.state_dict()
        apart[name] = max((now[key] - base[key]).abs().max().item() for key in base)
    refuse_unequal(losses)
    return losses, apart


def refuse_unequal(losses: dict[str, float]) -> None:
    """Raise RuntimeError for the first loss that is not the bare loop's, which is the first."""
    wanted = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - wanted) <= CLOSE * abs(wanted):  # true for nan, too
            raise RuntimeError(f"{name} ends with a loss of {loss}, {BARE} with {wanted}: the jobs are not equal.")


def over_ranks(results: list[dict[str, Found]]) -> dict[str, Found]:
    """Of each block the wall time of the slowest rank and the mean CPU time; of each distance the largest."""

    def join(blocks: tuple[Block, ...]) -> Block:
        return Block(max(b.wall for b in blocks), sum(b.cpu for b in blocks) / len(blocks))

    joined = {}
    for task, first in results[0].items():
        all_of = [result[task] for result in results]
        blocks = {
            name: [join(at_once) for at_once in zip(*(found.blocks[name] for found in all_of), strict=True)]
            for name in first.blocks
        }
        apart = {name: max(found.apart[name] for found in all_of) for name in first.apart}
        joined[task] = Found(blocks, first.loss, apart)
    return joined
