"""What runs in the ranks of `course bench scaling`: equal steps, by one rank alone, all apart, and all together."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.parallel.bench_hooks_measure import Times
from course_lib.parallel.ddp import gradient_bytes
from course_lib.train.model import ModelConfig, build

ONE, ONE_AGAIN, APART, ALL, ALL_AGAIN = "1 rank", "1 rank, again", "N apart", "N ranks", "N ranks, again"
CONTENDERS = {
    ONE: "rank 0 alone, while the others sleep",
    ONE_AGAIN: "the same a second time (A/A)",
    APART: "all ranks at once, each for itself: no communication, the ceiling for N ranks",
    ALL: "DDP over all ranks",
    ALL_AGAIN: "the same a second time (A/A)",
}
CLASSES = 10


@dataclass(frozen=True)
class Load:
    """`batch` samples a rank, whatever the number of ranks (weak scaling); `steps` are timed together."""

    about: str
    shape: tuple[int, int, int]
    model: ModelConfig
    batch: int
    steps: int


LOADS = {
    "compute": Load("a CNN, 16 images of 3x64x64 a rank: much arithmetic for each gradient",
                    (3, 64, 64), ModelConfig("cnn", width=32, dropout=0), 16, 4),
    "communication": Load("one hidden layer of 4096, 8 vectors of 1024 a rank: large gradients, little arithmetic",
                          (1, 32, 32), ModelConfig("mlp", width=512, dropout=0), 8, 10),
}  # fmt: skip


class Trained:
    """One contender's network with its group, on this rank."""

    def __init__(self, load: Load, group: dist.ProcessGroup) -> None:
        torch.manual_seed(dist.get_rank())
        self.images = torch.randn(load.batch, *load.shape)
        self.labels = torch.randint(CLASSES, (load.batch,))
        self.module = build(load.model, load.shape, CLASSES, 0)
        self.model = DistributedDataParallel(self.module, process_group=group)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> None:
        """One update."""
        F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(names: list[str], rounds: int, steps: int) -> dict[str, Times]:
    """For each load: seconds of a block, one for each round; 0 on ranks that slept.

    `steps` are timed together; 0: as many as the load says. Raises RuntimeError for unequal ends.
    """
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    found = {}
    for name in names:
        load = LOADS[name]
        groups = dict.fromkeys((ONE, ONE_AGAIN, APART), alone) | dict.fromkeys((ALL, ALL_AGAIN), dist.group.WORLD)
        runs = {way: Trained(load, group) for way, group in groups.items()}
        seconds = alternate({way: run.step for way, run in runs.items()}, rounds, steps or load.steps, name)
        verify({way: run.module for way, run in runs.items()})
        found[name] = Times(gradient_bytes(runs[ONE].module), seconds)
    return found


def alternate(ways: dict[str, Callable[[], None]], rounds: int, steps: int, name: str) -> dict[str, list[float]]:
    """Blocks of steps, in an order of its own in each round, the same on all ranks; one round more to warm up."""
    rank, seconds = dist.get_rank(), {way: [] for way in ways}
    for number in range(rounds + 1):
        if rank == 0:
            counted = f"round {number} of {rounds}" if number else "warm-up"
            print(f"{dist.get_world_size()} ranks, {name}: {counted}", flush=True)
        for way in random.Random(number).sample(list(ways), len(ways)):
            dist.barrier()
            began = time.perf_counter()
            works = rank == 0 or way not in (ONE, ONE_AGAIN)
            for _ in range(steps if works else 0):
                ways[way]()
            if number:
                seconds[way].append(time.perf_counter() - began if works else 0.0)
    dist.barrier()
    return seconds


def verify(modules: dict[str, nn.Module]) -> None:
    """Raise RuntimeError when twins, or ranks that trained together, end with other weights."""
    weights = {way: nn.utils.parameters_to_vector(module.parameters()).detach() for way, module in modules.items()}
    for one, other in ((ONE, ONE_AGAIN), (ALL, ALL_AGAIN)):
        if not torch.equal(weights[one], weights[other]):
            raise RuntimeError(f"'{one}' and '{other}' end with other weights.")
    if dist.get_rank() == 0 and not torch.equal(weights[ONE], weights[APART]):
        raise RuntimeError(f"Rank 0 ends with other weights in '{ONE}' than in '{APART}'.")
    first = weights[ALL].clone()
    dist.broadcast(first, src=0)
    if not torch.equal(first, weights[ALL]):
        raise RuntimeError(f"Rank {dist.get_rank()} ends with other weights than rank 0 in '{ALL}'.")
