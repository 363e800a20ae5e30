"""A right project.py for exercise 16: what a learner ends with. tests/check/test_project_runs.py trains with it."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from course_lib.train.config import Config
from course_lib.train.data import DataConfig
from course_lib.train.model import ModelConfig
from course_lib.train.optim import OptimConfig
from course_lib.train.sources import digits


def recipe():
    """The job: which network on which data, in which steps."""
    return Config(
        data=DataConfig("digits", global_batch=48),
        model=ModelConfig(f"{__file__}:network"),
        optim=OptimConfig(lr=0.05, epochs=6, warmup_epochs=1),
    )


class Block(nn.Module):
    """Two convolutions and a way around them. GroupNorm: each sample for itself, however many ranks there are."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)])
        same = stride == 1 and inside == outside
        self.around = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.around(x))


def network(shape, classes):
    """A small ResNet for images of 8x8."""
    stem = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class SlowDisk(Dataset):
    """Samples that take about a millisecond each to arrive."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(0.001)
        return self.samples[0, index]  # the key of a sample: epoch and index


def slow_disk():
    """The digits from a slow disk: training data, test data, number of classes."""
    found = digits(DataConfig(), seed=0)
    return SlowDisk(found.train), SlowDisk(found.test), found.classes


def ring_all_reduce(tensor):
    """Sum over all ranks, in place. tensor: one-dimensional, of equal length and dtype on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(tensor, size)
    for step in range(2 * (size - 1)):
        mine = chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(mine)
        sending = dist.isend(chunks[(rank - step) % size], right)
        dist.irecv(arrived, left).wait()
        sending.wait()
        if step < size - 1:
            mine += arrived  # reduce-scatter
        else:
            mine.copy_(arrived)  # all-gather


def hook(state, bucket):
    """DDP's comm hook: the average over the ranks of `state`, a process group."""
    gradients = bucket.buffer()
    ring_all_reduce(gradients)
    done = torch.futures.Future()
    done.set_result(gradients.div_(dist.get_world_size(state)))
    return done
