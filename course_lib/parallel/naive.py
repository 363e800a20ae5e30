"""Data parallelism, first version: when backward is done, one all-reduce for each parameter.

Right, and slow twice over: many small messages, each of which costs its latency, and not one of them while backward
computes (Li et al., "PyTorch Distributed", VLDB 13(12), 2020, section 3.2.1).

All-reduces a step: one for each learnable parameter, of its bytes, and one of 4 bytes a parameter that counts users.
"""

import torch

from course_lib.parallel.by_hand import DataParallelByHand


class NaiveDDP(DataParallelByHand):
    """One all-reduce a parameter, after backward. See DataParallelByHand for the arguments."""

    def average(self) -> None:
        """Make each `.grad` the average over all ranks."""
        for parameter in self.learnable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()  # as a collective wants it; mostly it is, and stays the same
            self.link.all_reduce(parameter.grad)
            parameter.grad.div_(self.link.size)
