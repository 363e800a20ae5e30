"""Who am I, which device is mine, how do I talk to the others: the only place that looks at the launcher.

World size 1 takes the same way as 64: the process group is always there.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.train import flight, meeting
from course_lib.train.errors import CannotWrite, ConfigError

PREPARATION = timedelta(hours=1)  # the longest wait for a download; training itself has run.timeout


@dataclass(frozen=True)
class Environment:
    """What a rank knows about itself; `control` is a gloo group for small objects, whatever the backend."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str
    control: dist.ProcessGroup

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def say(self, text: str = "") -> None:
        """Print, once for all ranks."""
        if self.first:
            speak(text)

    def share(self, value: Any = None) -> Any:
        """The value of rank 0, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that succeeds on all ranks or raises ConfigError or CannotWrite on all: what one finds, all report.

        No collective inside: a rank that raises would not take part in it.
        """
        problem = None
        try:
            yield
        except (ConfigError, CannotWrite) as error:
            problem = error
        for found in self.gather(problem):
            if found:
                raise found


def speak(text: str, error: bool = False) -> None:
    """Print a line. When nobody takes it any more (`| head -1`, a log on a full disk), a run goes on in silence."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def read_launcher() -> tuple[int, int, int, int]:
    """RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them.

    Without a launcher 0, 0, 1, 1.
    """
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    if not any(name in os.environ for name in names[:3]):
        return 0, 0, 1, 1
    missing = [name for name in [*names[:3], "MASTER_ADDR", "MASTER_PORT"] if name not in os.environ]
    if missing:
        raise ConfigError(
            f"A launcher has set only a part of the environment: {', '.join(missing)} is missing; "
            "start with torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE to train in one process."
        )
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    try:
        rank, local_rank, world_size, local_world = (int(os.environ[name]) for name in names)
    except ValueError:
        values = ", ".join(f"{name}={os.environ[name]}" for name in names)
        raise ConfigError(f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers, but found {values}.") from None
    return rank, local_rank, world_size, local_world


def choose_device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """cuda:LOCAL_RANK where there are GPUs, else the CPU. A node with fewer GPUs than ranks is refused."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus == 0:
        raise ConfigError("--run.device cuda was asked for, but torch sees no GPU here; use --run.device cpu.")
    if wanted == "cpu" or gpus == 0:
        return torch.device("cpu")
    if local_world > gpus:
        raise ConfigError(
            f"This node has {gpus} GPUs and {local_world} ranks, and two ranks cannot share a GPU with NCCL; "
            f"use --nproc-per-node={gpus}, or --run.device cpu."
        )
    return torch.device("cuda", local_rank)


def meet(rank: int, world_size: int, timeout: float) -> dist.Store:
    """The store through which the ranks of this launch find each other."""
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout)))
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        store = meeting.fresh(store, rank, world_size, timeout)
    return store


@contextmanager
def start(device: str = "auto", timeout: float = 120.0) -> Iterator[Environment]:
    """Set the device, start the process group (NCCL on GPUs, gloo on CPUs), end it when all went well.

    `timeout` in seconds bounds each collective until the heartbeat sets another one.
    """
    rank, local_rank, world_size, local_world = read_launcher()
    mine = choose_device(device, local_rank, local_world)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads than cores made ranks 10 times slower and more
    backend = "gloo"
    if mine.type == "cuda":
        torch.cuda.set_device(mine)  # before the group: NCCL takes the current device
        backend = "nccl"
    alone = "RANK" not in os.environ
    flight.turn_on()
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout),
        rank=rank,
        world_size=world_size,
        # Without a launcher there is nobody to meet, and no port is needed.
        store=dist.HashStore() if alone else meet(rank, world_size, timeout),
    )
    control = dist.new_group(backend="gloo", timeout=PREPARATION)
    try:
        yield Environment(rank, local_rank, world_size, mine, backend, control)
    except (ConfigError, CannotWrite):  # all ranks raise it together
        dist.destroy_process_group()
        raise
    # After any other failure the peers may be gone, and destroying could wait for them: the process ends
    # instead.
    dist.barrier(group=control)  # a rank that leaves early breaks those that still read from it
    dist.destroy_process_group()
