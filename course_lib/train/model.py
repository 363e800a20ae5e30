"""The networks that a recipe can name. All adapt to the data: channels, side and classes come from there."""

import math
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from torch import nn

from course_lib.train import own
from course_lib.train.errors import ConfigError
from course_lib.train.randomness import mix

NAMES = ("cnn", "mlp", "resnet18", "resnet50")


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    name: str = "cnn"
    """cnn: convolutions until the side is at most 4; mlp: one hidden layer; resnet18, resnet50: torchvision's;
    or FILE.py:FUNCTION, see own.py."""
    width: int = 16
    """Channels of the first convolution, or hidden units / 8 (cnn and mlp only)."""
    norm: Literal["none", "batch"] = "none"
    """BatchNorm after each convolution (cnn only)."""
    dropout: float = 0.1
    """Before the last layer (cnn and mlp only)."""
    dtype: Literal["float32", "float64"] = "float32"
    """float64 is for comparing runs to the last bits."""
    channels_last: bool = False
    """Images and convolutions with the channels innermost, as tensor cores like it. Only the last bits change."""
    compile: Literal["no", "inductor", "aot_eager", "eager"] = "no"
    """torch.compile the network with this backend: inductor makes kernels, the others only show whether it can be."""
    recompute: bool = False
    """Activation checkpointing: keep only what goes into each block and compute the block again in backward. Same bits,
    less memory, one more forward."""
    sync_batchnorm: bool = False
    """BatchNorm's mean and deviation over the microbatches of all ranks. GPUs only."""


def check(config: ModelConfig) -> None:
    """Raise ConfigError for a name that no network has, and for numbers that none can have."""
    if config.name not in NAMES and not own.is_named(config.name):
        raise ConfigError(
            f"There is no network {config.name!r}; --model.name can be {', '.join(NAMES)} or FILE.py:FUNCTION."
        )
    if config.width < 1:
        raise ConfigError(f"--model.width must be at least 1, but is {config.width}.")
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"--model.dropout must be at least 0 and less than 1, but is {config.dropout}.")
    if config.recompute and config.compile != "no":
        raise ConfigError(
            "--model.recompute does not go with --model.compile: torch.compile decides by itself what to keep for "
            "backward and what to compute again, and cannot follow blocks that keep BatchNorm's statistics apart."
        )


def cnn(shape: tuple[int, int, int], classes: int, width: int, norm: str, dropout: float) -> nn.Module:
    """Conv, ReLU; then pairs of conv, ReLU, pool with twice the channels until the side is at most 4."""
    channels, *sides = shape
    layers: list[nn.Module] = []

    def convolution(inside: int, outside: int) -> None:
        layers.append(nn.Conv2d(inside, outside, 3, padding=1))
        if norm == "batch":
            layers.append(nn.BatchNorm2d(outside))
        layers.append(nn.ReLU())

    convolution(channels, width)
    while max(sides) > 4:
        if min(sides) < 2:
            raise ConfigError(f"Images of {shape[1]} x {shape[2]} are too narrow for the cnn; use --model.name mlp.")
        wider = min(2 * width, 256)
        convolution(width, wider)
        layers.append(nn.MaxPool2d(2))
        width, sides = wider, [side // 2 for side in sides]
    features = width * sides[0] * sides[1]
    head = [nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, classes)]
    return nn.Sequential(*layers, *head)


def mlp(shape: tuple[int, ...], classes: int, width: int, dropout: float) -> nn.Module:
    """One hidden layer."""
    inputs = math.prod(shape)
    hidden = 8 * width
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)
    )


def resnet(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """torchvision's network without weights; the first layer is exchanged when the images are not RGB."""
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=classes)
    if shape[0] != 3:
        model.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
    return model


def build(config: ModelConfig, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The network on the CPU, the same on each rank: its first weights are a function of the seed.

    Raises ConfigError for one that this machine cannot hold.
    """
    check_memory(config, shape, classes)
    torch.manual_seed(mix(seed, 0))
    return _network(config, shape, classes).to(getattr(torch, config.dtype))


def check_memory(config: ModelConfig, shape: tuple[int, ...], classes: int) -> None:
    """Raise ConfigError when weights, gradients, DDP's buckets and momentum of one rank exceed the memory."""
    if config.name not in ("cnn", "mlp"):
        return  # the width is not for the others
    itemsize = getattr(torch, config.dtype).itemsize
    try:
        with torch.device("meta"):  # shapes without memory
            parameters = sum(p.numel() for p in _network(config, shape, classes).parameters())
    except (RuntimeError, OverflowError, TypeError):  # sizes beyond 64 bits
        raise ConfigError(f"--model.width {config.width} makes a network larger than can be counted.") from None
    needed, there = 4 * itemsize * parameters / 2**30, psutil.virtual_memory().total / 2**30
    if needed > there:
        raise ConfigError(
            f"--model.width {config.width} makes {parameters:,} parameters, which take {needed:,.0f} GiB on each "
            f"rank to train, and this machine has {there:,.0f} GiB."
        )


def _network(config: ModelConfig, shape: tuple[int, ...], classes: int) -> nn.Module:
    if own.is_named(config.name):
        return own.network(config.name, shape, classes)
    if config.name == "mlp":
        return mlp(shape, classes, config.width, config.dropout)
    if len(shape) != 3:
        raise ConfigError(f"--model.name {config.name} is for images, and a sample here has the shape {shape}.")
    if config.name == "cnn":
        return cnn(shape, classes, config.width, config.norm, config.dropout)
    return resnet(config.name, shape, classes)
