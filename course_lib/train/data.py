"""One loader for all data sets.

`open_data` finds, downloads or makes them, `loader` deals samples to the ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from course_lib.train import batches
from course_lib.train.environment import Environment
from course_lib.train.errors import ConfigError
from course_lib.train.order import Order, share
from course_lib.train.randomness import seed_sample
from course_lib.train.stopping import leave_to_the_rank

Key = tuple[int, int]  # (epoch, index): all that a sample depends on, beside the seed


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how it is dealt."""

    name: str = "digits"
    """digits, mnist, fashion, cifar10, imagenette, imagefolder:PATH (imagefolder alone: --data.root),
    synthetic:3x224x224 (noise, to measure speed), or FILE.py:FUNCTION, see own.py."""
    root: str = "data"
    """Where downloads are kept."""
    global_batch: int = 48
    """Samples of a step over all ranks together; each rank takes its part. 48 suits 1, 2, 3, 4, 6, 8.
    0: batch x accumulate x ranks, so that it grows with the ranks."""
    batch: int = 0
    """Samples that a rank takes through the network at a time. 0: global_batch / (ranks x accumulate)."""
    accumulate: int = 0
    """Microbatches of a rank in a step: gradients add up, and are averaged over the ranks once.
    0: global_batch / (ranks x batch), or 1."""
    eval_batch: int = 256
    """Samples a rank evaluates at a time; the result does not depend on it."""
    workers: int = 0
    """Loader processes of each rank. They change the speed, not one bit of the result."""
    augment: Literal["none", "crop", "crop-flip", "resized-crop"] = "none"
    """crop: pad by an eighth and cut; resized-crop: as for ImageNet, with flips."""
    mixup: float = 0.0
    """Train on mixtures of two images, with weights from a Beta(mixup, mixup) distribution (Zhang et al. 2018). 0: no.
    The training loss is then that of the mixtures."""
    side: int = 0
    """Height and width of the resized images; 0 takes those of the data (224 for imagefolder and imagenette)."""
    drop_last: bool = False
    """Leave out the samples that do not fill the last global batch of an epoch."""
    samples: int = 4096
    """How many training samples synthetic data has."""
    strict: bool = False
    """Stop when a download fails, instead of training on digits."""


@dataclass(frozen=True)
class Data:
    """What was opened. `note` is empty, or one sentence that every picture of the run must show."""

    name: str
    train: Dataset
    test: Dataset
    shape: tuple[int, ...]  # channels, height, width; of one's own data whatever it is
    classes: int
    note: str = ""


def identity(image: torch.Tensor) -> torch.Tensor:
    """The transform of samples that are ready."""
    return image


class Samples(Dataset):
    """Images and labels under the key (epoch, index), each augmented with its own seed."""

    def __init__(self, items: Dataset, seed: int, transform: Callable[..., torch.Tensor]) -> None:
        self.items, self.seed, self.transform = items, seed, transform
        pairs = type(items) is TensorDataset and [t.ndim for t in items.tensors[1:]] == [1]  # a number for each label
        self.by_tensor = transform is identity and (pairs or getattr(items, "by_tensor", False))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, int]:
        epoch, index = key
        seed_sample(self.seed, epoch, index)
        image, label = self.items[index]
        return self.transform(image), int(label)

    def __getitems__(self, keys: list[Key]) -> list[tuple[torch.Tensor, int]]:
        """All samples of a batch: torch's loader asks for this. Tensors are indexed once for all of them."""
        if not self.by_tensor:
            return [self[key] for key in keys]
        images, labels = self.items[torch.tensor([index for _, index in keys], dtype=torch.int64)]
        return list(zip(images.unbind(), labels.long().tolist(), strict=True))


def check(config: DataConfig, world_size: int) -> None:
    """Raise ConfigError for numbers that cannot work, before anything is opened."""
    for name in ("eval_batch", "samples"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--data.{name} must be at least 1, but is {getattr(config, name)}.")
    for name in ("global_batch", "batch", "accumulate", "workers", "side"):
        if getattr(config, name) < 0:
            raise ConfigError(f"--data.{name} must be at least 0, but is {getattr(config, name)}.")
    if not 0 <= config.mixup < math.inf:
        raise ConfigError(f"--data.mixup must be at least 0 and finite, but is {config.mixup}.")
    settled(config, world_size)


def settled(config: DataConfig, world_size: int) -> DataConfig:
    """The same with all batch sizes known, see batches.py; raises ConfigError when they do not fit each other."""
    numbers = batches.settle(config.global_batch, config.batch, config.accumulate, world_size)
    return replace(config, **dict(zip(("global_batch", "batch", "accumulate"), numbers, strict=True)))


def check_size(config: DataConfig, data: Data, world_size: int) -> None:
    """Raise ConfigError when one step would need more samples than there are."""
    samples = len(data.train)
    if samples == 0 or len(data.test) == 0:
        raise ConfigError(f"{data.name} has {samples} training and {len(data.test)} test samples; both need some.")
    if config.global_batch > samples:
        unit = world_size * config.accumulate
        raise ConfigError(
            f"A global batch of {config.global_batch} is larger than the {samples} training samples of "
            f"{data.name}; --data.global_batch {samples // unit * unit} is the most."
        )


def collate(shape: tuple[int, ...], batch: list) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, *shape) float32 and (n,) int64; n is 0 for a rank without a share."""
    images = [image for image, _ in batch]
    labels = torch.tensor([label for _, label in batch], dtype=torch.int64)
    return (torch.stack(images) if images else torch.empty(0, *shape)), labels


class _Steps:
    """A batch sampler without state: each iteration gives the keys of the same steps."""

    def __init__(self, keys: Callable[[], Iterator[list[Key]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return self.keys()


def _loader(dataset: Dataset, keys: Callable, data: Data, workers: int, env: Environment) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=_Steps(keys),
        num_workers=workers,
        worker_init_fn=leave_to_the_rank,
        collate_fn=partial(collate, data.shape),
        pin_memory=env.device.type == "cuda",
    )


def train_loader(config: DataConfig, data: Data, order: Order, env: Environment, first: int, last: int) -> DataLoader:
    """The microbatches of this rank, for each step from first to last, across epochs."""
    keys = partial(train_keys, order, config.batch, env.rank, env.world_size, first, last)
    return _loader(data.train, keys, data, config.workers, env)


def train_keys(order: Order, batch: int, rank: int, world_size: int, first: int, last: int) -> Iterator[list[Key]]:
    """The keys of each microbatch."""
    for mine in order.keys(rank, world_size, first, last):
        yield from batches.pieces(mine, batch)


def test_keys(samples: int, batch: int, rank: int, world_size: int) -> Iterator[list[Key]]:
    """Each test sample once, over all ranks together: nothing is padded, so ranks may have unequal numbers.

    >>> [list(test_keys(5, 2, rank, 2)) for rank in range(2)]
    [[[(0, 0), (0, 2)], [(0, 4)]], [[(0, 1), (0, 3)]]]
    """
    mine = share(np.arange(samples), rank, world_size).tolist()
    for start in range(0, len(mine), batch):
        yield [(0, index) for index in mine[start : start + batch]]


def test_loader(config: DataConfig, data: Data, env: Environment) -> DataLoader:
    """The test batches of this rank."""
    keys = partial(test_keys, len(data.test), config.eval_batch, env.rank, env.world_size)
    return _loader(data.test, keys, data, config.workers, env)
