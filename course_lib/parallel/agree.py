"""What ranks must agree on before they may add gradients: the same parameters, with the same values, all in use."""

import math
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from course_lib.parallel.link import OwnLink, TorchLink

Link = TorchLink | OwnLink
_WIDENED = (torch.bool, torch.uint8, torch.int8, torch.int16)  # not every collective carries these
_NAMED = 12  # at most so many parameters in one error


def learnable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters whose gradients are averaged, with their qualified names, in the order of `named_parameters()`.

    Frozen ones have no gradient. A tied weight is one parameter and stands here once, under its first name.
    """
    if lazy := [name for name, p in module.named_parameters() if nn.parameter.is_lazy(p)]:
        raise ValueError(f"{_list(lazy)} has no shape yet: run one batch through the module before you wrap it.")
    found = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    if not found:
        raise ValueError("No parameter of this module requires a gradient, so there is nothing to average.")
    return found


def same_on_all_ranks(module: nn.Module, link: Link) -> None:
    """Raise the same ValueError on all ranks when they have built different modules.

    Otherwise they would wait for each other, or add what does not belong together. Two small max all-reduces: the
    max of a number and of its opposite are opposites only when all ranks brought the same number.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    device = tensors[0][1].device
    texts = [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors]
    low, high = _range(torch.tensor([len(texts)], device=device), link)
    if low != high:
        raise ValueError(
            f"The ranks wrap different modules: one has {low.item()} parameters and buffers, one {high.item()}."
        )
    low, high = _range(torch.tensor([zlib.crc32(text.encode()) for text in texts], device=device), link)
    if (low != high).any():
        number = int((low != high).nonzero()[0])
        raise ValueError(
            f"The ranks wrap different modules: number {number} of the {len(texts)} parameters and buffers, counted "
            "from 0, has not the same name, shape, dtype and requires_grad on all of them."
        )


def _range(numbers: torch.Tensor, link: Link) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest over all ranks, of each of these int64."""
    both = torch.cat([numbers, -numbers])
    link.all_reduce(both, "max")
    high, low = both.chunk(2)
    return -low, high


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], link: Link) -> None:
    """All ranks get the values of rank 0: one message for all tensors of the same dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, _), group in groups.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        flat = flat.to(torch.int32) if dtype in _WIDENED else flat
        link.broadcast(flat)
        for tensor, values in zip(group, flat.split([t.numel() for t in group]), strict=True):
            # .data: autograd must not take this for a change, should a graph have saved a buffer (eval mode).
            tensor.data.copy_(values.view(tensor.shape))


def state(module: nn.Module) -> dict[str, tuple]:
    """What must not change after wrapping: hooks and buckets belong to these parameters."""
    return {name: (id(p), p.dtype, p.device, p.requires_grad) for name, p in module.named_parameters()}


def check_unchanged(before: dict[str, tuple], module: nn.Module) -> None:
    """Raise a RuntimeError that names the parameters that are not as they were when the module was wrapped."""
    now = state(module)
    if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        raise RuntimeError(
            f"{_list(changed)} changed after the module was wrapped (frozen or unfrozen, replaced, or moved to another "
            "dtype or device): do that first, then wrap."
        )


def unused_text(names: Sequence[str], counts: Sequence[int], size: int) -> str | None:
    """Of parameters that not all ranks used, the same sentence on all ranks; None when there are none."""
    missing = [f"{name} ({n} of {size} ranks)" for name, n in zip(names, counts, strict=True) if n < size]
    if not missing:
        return None
    return (
        f"No gradient in this step, on some rank or on all, for {_list(missing)}; in brackets: how many ranks had one. "
        'Freeze what no loss depends on; if a step may leave parameters out, use unused="zero": ranks without a '
        "gradient then count as zero."
    )


def check_arguments(module: nn.Module, bucket_mb: float, unused: str) -> None:
    """Raise TypeError or ValueError before anything is sent."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: give a torch.nn.Module.")
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float):
        raise TypeError(f"bucket_mb={bucket_mb!r}: give the capacity of a bucket as a number of MiB.")
    if math.isnan(bucket_mb) or bucket_mb <= 0:
        raise ValueError(f"bucket_mb={bucket_mb!r}: the capacity of a bucket is more than 0 MiB.")
    if unused not in ("error", "zero"):
        raise ValueError(f'unused={unused!r}: choose "error" or "zero".')


def _list(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
