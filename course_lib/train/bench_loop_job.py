"""The equal job of `course bench loop`: data in memory, network, optimizer and order, the same for each contender."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from course_lib.train import model
from course_lib.train.config import Config
from course_lib.train.data import Data, DataConfig, Key, train_loader
from course_lib.train.environment import Environment
from course_lib.train.model import ModelConfig
from course_lib.train.optim import OptimConfig
from course_lib.train.order import Order

POOL, CLASSES = 64, 10


@dataclass(frozen=True)
class Task:
    """`batch` samples a rank; `steps` are timed together."""

    about: str
    shape: tuple[int, int, int]
    model: ModelConfig
    batch: int
    steps: int


# No dropout: its random numbers would differ between contenders, and so would their losses.
TASKS = {
    "small": Task(
        "the CNN of the recipe digits, 24 images of 1x8x8 a rank", (1, 8, 8), ModelConfig(dropout=0), 24, 100
    ),
    "large": Task("ResNet-18, 8 images of 3x64x64 a rank", (3, 64, 64), ModelConfig("resnet18"), 8, 5),
}


class Memory(Dataset):
    """Noise from a pool of 64 images under the key (epoch, index): handing out a sample takes next to no time."""

    def __init__(self, samples: int, shape: tuple[int, int, int]) -> None:
        self.samples = samples
        images = torch.randn(POOL, *shape, generator=torch.Generator().manual_seed(0))
        self.items = [(image, number % CLASSES) for number, image in enumerate(images)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        return self.items[key[1] % POOL]


class Silent(Environment):
    """An Environment that prints nothing: the screen belongs to the bench."""

    def say(self, text: str = "") -> None:
        pass


@dataclass(frozen=True)
class Equal:
    """One job of `steps` steps; all of it lies within one epoch, so that nothing is evaluated."""

    config: Config
    env: Environment
    data: Data
    order: Order
    steps: int

    def network(self) -> torch.nn.Module:
        """A new one, always with the same weights."""
        return model.build(self.config.model, self.data.shape, self.data.classes, self.config.run.seed)

    def optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """SGD with a rate that stays as it is."""
        optim = self.config.optim
        return torch.optim.SGD(
            module.parameters(), lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay
        )

    def loader(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's batches, one for each step."""
        return train_loader(self.config.data, self.data, self.order, self.env, 1, self.steps)


def equal_job(task: Task, steps: int) -> Equal:
    """The job for the process group that is up, on the CPU. All ranks call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    env = Silent(rank, rank, world, torch.device("cpu"), "gloo", dist.new_group(backend="gloo"))
    samples = (steps + 1) * task.batch * world
    config = Config(
        data=DataConfig("memory", global_batch=task.batch * world, batch=task.batch, accumulate=1),
        model=task.model,
        optim=OptimConfig(lr=0.01, epochs=1, warmup_epochs=0, final_lr=1),  # a cosine from 0.01 to 0.01
    )
    config = replace(config, run=replace(config.run, timeout=3600, stall=1_000_000))  # sleeping is no stall
    memory = Memory(samples, task.shape)
    data = Data("memory", memory, memory, task.shape, CLASSES)
    return Equal(config, env, data, Order(config.run.seed, samples, config.data.global_batch), steps)
