"""Data parallelism, second version: gradients side by side in flat buckets, one all-reduce for each bucket.

Few large messages instead of many small ones; still all of them after backward (Li et al., "PyTorch Distributed", VLDB
13(12), 2020, section 3.2.2).

All-reduces a step: one for each bucket, of its bytes, and one of 4 bytes a parameter that counts users. The buckets'
bytes add up to those of the parameters.
"""

import torch
from torch import nn

from course_lib.parallel.by_hand import DataParallelByHand
from course_lib.parallel.link import OwnLink, TorchLink


class Bucket:
    """Some parameters, and the flat buffer of which their gradients are views.

    numbers  which parameters, by their numbers in `learnable`
    """

    def __init__(self, numbers: list[int], parameters: list[nn.Parameter], link: TorchLink | OwnLink) -> None:
        self.numbers, self.parameters = numbers, parameters
        lengths = [p.numel() for p in parameters]
        self.buffer = link.empty(sum(lengths), parameters[0].dtype, parameters[0].device)
        parts = self.buffer.split(lengths)
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def take(self, place: int) -> None:
        """Let the gradient of `parameters[place]` be a view of the buffer; None becomes zeros.

        After `zero_grad(set_to_none=False)` it still is the view, and nothing is copied. After plain `zero_grad()`
        backward has made a new tensor, which is copied here and let go.
        """
        parameter, view = self.parameters[place], self.views[place]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def pack(self) -> None:
        """Take all gradients."""
        for place in range(len(self.parameters)):
            self.take(place)


def fill_buckets(parameters: list[nn.Parameter], capacity: int) -> list[list[int]]:
    """Which parameters share a bucket, by number.

    From the last to the first, since backward reaches the last layer first. A bucket holds one dtype on one device
    and at most `capacity` bytes, or a single larger tensor. Buckets are in the order in which they get full.
    """
    buckets: list[list[int]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        kind, nbytes = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        bucket, filled = open_.get(kind, ([], 0))
        if not bucket or filled + nbytes > capacity:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(number)
        open_[kind] = (bucket, filled + nbytes)
    return sorted(buckets, key=lambda numbers: -numbers[-1])


class BucketedDDP(DataParallelByHand):
    """One all-reduce a bucket, after backward. See DataParallelByHand for the arguments."""

    def prepare(self, capacity: int) -> None:
        """Make the buckets."""
        filled = fill_buckets(self.learnable, capacity)
        self.buckets = [Bucket(numbers, [self.learnable[n] for n in numbers], self.link) for numbers in filled]

    def average(self) -> None:
        """Make each `.grad` the average over all ranks."""
        for bucket in self.buckets:
            bucket.pack()
            self.link.all_reduce(bucket.buffer)
            bucket.buffer.div_(self.link.size)
