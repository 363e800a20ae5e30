"""Cut a flat tensor into chunks, one for each rank."""

import torch


def split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """`parts` views of the flat `tensor`, in order, whose lengths differ by at most 1; the longer ones come first.

    (torch.chunk rounds the length up instead: 5 elements in 4 parts become 2, 2, 1 and no fourth chunk.)

    >>> [len(chunk) for chunk in split(torch.zeros(10), 4)]
    [3, 3, 2, 2]
    """
    return list(torch.tensor_split(tensor, parts))


def length(numel: int, parts: int, index: int) -> int:
    """Elements in chunk `index` of `split`, without a tensor.

    >>> [length(10, 4, index) for index in range(4)]
    [3, 3, 2, 2]
    """
    return numel // parts + (index < numel % parts)
