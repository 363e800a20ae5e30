"""From the caller's tensor to a flat one that a collective can cut up, and back; bad arguments end here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

OPS = ("sum", "mean", "max")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


@dataclass(frozen=True)
class Operand:
    """What an algorithm works on.

    flat     the elements in a row, contiguous, shape (numel,); shares memory with the caller's tensor if it can
    combine  what a transport does with what arrives: "sum" or "max"
    finish   called once on each element, in place, by the one rank that has combined all ranks' values of it;
             for "mean" it divides. Because one rank finishes and the others copy, all end with the same bits.
    """

    flat: torch.Tensor
    combine: str
    finish: Callable[[torch.Tensor], object]


@contextmanager
def opened(tensor: torch.Tensor, op: str, ranks: int) -> Iterator[Operand]:
    """The operand for `tensor` over `ranks` ranks. A tensor that is not contiguous is copied, and back at the end.

    Sums are made in the tensor's own dtype, as `torch.distributed` does: a float16 sum above 65504 is infinite,
    and so is the mean that is made from it.

    Raises TypeError or ValueError before anything is sent.
    """
    _check(tensor, op)
    tensor = tensor.detach()  # same memory; a leaf that requires grad may be changed in place this way
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # view(-1) may leave one element a stride of 3
    mean = op == "mean"
    yield Operand(flat, "sum" if mean else op, (lambda chunk: chunk.div_(ranks)) if mean else (lambda chunk: chunk))
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _check(tensor: torch.Tensor, op: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"A collective works on a tensor, not on a {type(tensor).__name__}.")
    if op not in OPS:
        raise ValueError(f"op={op!r}: choose 'sum', 'mean' or 'max'.")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"A collective carries dense tensors of {names}, not {tensor.dtype} ({tensor.layout}).")
    if op == "mean" and not tensor.dtype.is_floating_point:
        raise TypeError(
            f"The mean of {tensor.dtype} tensors need not be a whole number: use op='sum' and divide, or convert first."
        )
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            "Several elements of this tensor are the same memory (it was expanded): they cannot be changed in place "
            "one by one. Use tensor.clone()."
        )
