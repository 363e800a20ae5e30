"""Which sample is seen when, and by whom: pure functions of (seed, step, world size).

The order of an epoch does not depend on the number of ranks: each step takes the next `global_batch` samples,
and these are dealt to the ranks like cards. So N ranks see in a step what one process would see.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def steps_per_epoch(samples: int, global_batch: int, drop_last: bool = False) -> int:
    """How many updates an epoch has.

    >>> steps_per_epoch(10, 4), steps_per_epoch(10, 4, drop_last=True)
    (3, 2)
    """
    return samples // global_batch if drop_last else -(-samples // global_batch)


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """A permutation of range(samples), another one each epoch (int64, one value a sample).

    >>> sorted(epoch_order(0, 3, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)


def share(indices: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """The part of a rank: sizes differ by one at most, nothing is repeated or left out.

    >>> [share(np.arange(5), rank, 3).tolist() for rank in range(3)]
    [[0, 3], [1, 4], [2]]
    """
    return indices[rank::world_size]


@dataclass(frozen=True)
class Order:
    """The order of a whole run. Steps count from 1; the first epoch is 1."""

    seed: int
    samples: int
    global_batch: int
    drop_last: bool = False

    @property
    def per_epoch(self) -> int:
        return steps_per_epoch(self.samples, self.global_batch, self.drop_last)

    def epoch(self, step: int) -> int:
        """The epoch that a step belongs to.

        >>> [Order(0, 10, 4).epoch(step) for step in (1, 3, 4)]
        [1, 1, 2]
        """
        return (step - 1) // self.per_epoch + 1

    def count(self, step: int) -> int:
        """How many samples all ranks together see at a step: the global batch, or what is left of the epoch.

        >>> [Order(0, 10, 4).count(step) for step in (1, 2, 3, 4)]
        [4, 4, 2, 4]
        """
        first = (step - 1) % self.per_epoch * self.global_batch
        return min(self.global_batch, self.samples - first)

    def share_sizes(self, world_size: int) -> set[int]:
        """How many samples a rank can have in a step.

        >>> sorted(Order(0, 49, 24).share_sizes(2))
        [0, 1, 12]
        """
        counts = {self.count(1), self.count(self.per_epoch)}
        return {len(range(rank, count, world_size)) for count in counts for rank in range(world_size)}

    def keys(self, rank: int, world_size: int, first: int, last: int) -> Iterator[list[tuple[int, int]]]:
        """For each step from first to last: the (epoch, index) of the samples of this rank."""
        epoch, order = 0, np.empty(0, np.int64)
        for step in range(first, last + 1):
            if self.epoch(step) != epoch:
                epoch = self.epoch(step)
                order = epoch_order(self.seed, epoch, self.samples)
            start = (step - 1) % self.per_epoch * self.global_batch
            mine = share(order[start : start + self.count(step)], rank, world_size)
            yield [(epoch, int(index)) for index in mine]
