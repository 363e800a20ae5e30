"""A network made ready for its device, before DDP wraps it: no parameter is replaced afterwards, no key renamed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from course_lib.train.errors import ConfigError
from course_lib.train.model import ModelConfig


def place(module: nn.Module, config: ModelConfig, device: torch.device) -> nn.Module:
    """The network on its device, in its layout, with BatchNorm over all ranks if that is wanted."""
    if config.sync_batchnorm:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    module.to(device)
    if config.channels_last:
        module.to(memory_format=torch.channels_last)
    return module


def lay_out(images: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """A batch in the layout of the network."""
    return images.contiguous(memory_format=torch.channels_last) if config.channels_last else images


def hasten(module: nn.Module, config: ModelConfig) -> None:
    """Recompute activations, compile. After this the network must not be copied: what it calls belongs to the first.

    The *inner* network is compiled, so the checkpoint's keys stay what they are. Its backward is then one piece, and
    gradients arrive together at its end: less overlap for faster kernels.
    """
    if config.recompute:
        recompute(module)
    if config.compile != "no":
        module.compile(backend=config.compile)


def recompute(module: nn.Module) -> None:
    """Keep only what goes into each block, and compute the block again in backward (Chen et al. 2016).

    Blocks are the children of each Sequential or ModuleList, where these have several layers themselves (ResNet's
    residual blocks). A network that is one Sequential is cut into about as many runs as each has layers.
    """
    if isinstance(module, nn.Sequential):
        layers = list(module)
        length = max(1, round(len(layers) ** 0.5))
        runs = [nn.Sequential(*layers[i : i + length]) for i in range(0, len(layers), length)]
        blocks = [_again(run.forward, run) for run in runs[:-1]]  # the last would be computed twice in a row
        module.forward = partial(_chain, [*blocks, runs[-1].forward])
        return
    for block in blocks_of(module):
        block.forward = _again(block.forward, block)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """What `recompute` recomputes in a network that is no Sequential itself."""
    holders = [child for child in module.modules() if isinstance(child, (nn.Sequential, nn.ModuleList))]
    found = [block for holder in holders for block in holder if len(list(block.children())) > 1]
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


def check(config: ModelConfig, module: nn.Module, device: torch.device, even: bool) -> None:
    """Raise ConfigError for what this network cannot do here; `even`: ranks have equally many microbatches, none empty.

    SyncBatchNorm talks in each forward, so a rank with one forward less would be waited for.
    """
    if config.sync_batchnorm and device.type == "cpu":
        raise ConfigError(
            "--model.sync_batchnorm works on GPUs only: torch's SyncBatchNorm refuses tensors on the CPU. "
            "Leave it out, or use a larger --data.batch."
        )
    if config.sync_batchnorm and not even:
        raise ConfigError(
            "--model.sync_batchnorm needs as many microbatches on each rank in each step, but in the last step of an "
            "epoch some ranks have fewer; use --data.drop_last."
        )
    if config.recompute and not isinstance(module, nn.Sequential) and not blocks_of(module):
        raise ConfigError(
            f"--model.recompute finds no blocks in {type(module).__name__}: it recomputes the children of a Sequential "
            "or ModuleList that have several layers themselves."
        )
    if config.channels_last and not any(p.ndim == 4 for p in module.parameters()):
        raise ConfigError("--model.channels_last is for networks with 2-d convolutions, and this one has none.")


def _again(forward: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
    # Non-reentrant: the reentrant kind needs an input that requires gradients, and DDP dislikes it.
    return partial(checkpoint, forward, use_reentrant=False, context_fn=lambda: (nullcontext(), counted_once(block)))


def _chain(steps: list[Callable[[Any], Any]], x: Any) -> Any:
    for step in steps:
        x = step(x)
    return x


@contextmanager
def counted_once(block: nn.Module) -> Iterator[None]:
    """While a block is computed again, its BatchNorms do not take the same batch into their statistics again.

    They must still be given the statistics, since autograd keeps these, too, and compares what it keeps.
    """
    norms = [layer for layer in block.modules() if isinstance(layer, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
