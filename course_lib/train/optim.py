"""The optimizer, how long it runs, and its learning rate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from course_lib.train.errors import ConfigError
from course_lib.train.schedule import rate, scaled


@dataclass(frozen=True)
class OptimConfig:
    """Which optimizer, with which numbers, for how long."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    """The highest learning rate: for the global batch as it is, or for reference_batch samples."""
    reference_batch: int = 0
    """lr is for so many samples a step and is scaled to the global batch: in proportion for sgd, by the square root for
    adamw. 0: lr is for the global batch, whatever it is."""
    epochs: int = 10
    """How often each sample is seen."""
    warmup_epochs: float = 1.0
    """The rate rises in a straight line during these."""
    final_lr: float = 0.0
    """The rate at the end of the cosine, as a part of lr."""
    momentum: float = 0.9
    """sgd only."""
    nesterov: bool = False
    """sgd only."""
    weight_decay: float = 5e-4
    decay: Literal["all", "matrices"] = "all"
    """matrices: biases and the scales of norms do not decay."""
    clip: float = 0.0
    """Gradients are shortened to this norm, all parameters together, after their average. 0: never."""
    zero: bool = False
    """ZeRO-1: each rank keeps the optimizer's state of its part of the parameters only, updates that part, and sends it
    to the others. Same bits, less memory."""
    average: float = 0.0
    """Keep a moving average of the weights with this decay, such as 0.999; it is evaluated and saved, too. 0: no."""
    label_smoothing: float = 0.0


def check(config: OptimConfig) -> None:
    """Raise ConfigError for numbers that cannot train."""
    rules = [
        ("lr", math.isfinite(config.lr), "a finite number"),
        ("lr", config.lr > 0, "greater than 0"),
        ("epochs", config.epochs >= 1, "at least 1"),
        (
            "warmup_epochs",
            0 <= config.warmup_epochs <= config.epochs,
            f"between 0 and the {config.epochs} epochs",
        ),
        ("final_lr", 0 <= config.final_lr <= 1, "between 0 and 1, as a part of lr"),
        ("momentum", 0 <= config.momentum < 1, "at least 0 and less than 1"),
        ("weight_decay", 0 <= config.weight_decay < math.inf, "at least 0 and finite"),
        ("reference_batch", config.reference_batch >= 0, "at least 0"),
        ("clip", 0 <= config.clip < math.inf, "at least 0 and finite"),
        ("average", 0 <= config.average < 1, "at least 0 and less than 1"),
        ("label_smoothing", 0 <= config.label_smoothing < 1, "at least 0 and less than 1"),
    ]
    for name, holds, wanted in rules:
        if not holds:
            raise ConfigError(f"--optim.{name} must be {wanted}, but is {getattr(config, name)}.")
    if config.nesterov and config.momentum == 0:
        raise ConfigError("--optim.nesterov needs a momentum greater than 0, but --optim.momentum is 0.")


def build(config: OptimConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters that train."""
    groups = decay_groups(learnable(module), config.weight_decay, config.decay == "all")
    if config.name == "adamw":
        kind, options = torch.optim.AdamW, {}
    else:
        kind, options = torch.optim.SGD, {"momentum": config.momentum, "nesterov": config.nesterov}
    if config.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # a long import that others do without

        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, lr=config.lr, **options)
    return kind(groups, lr=config.lr, **options)


def learnable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that train; tied ones once."""
    return [p for p in module.parameters() if p.requires_grad]


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float, everything: bool) -> list[dict[str, Any]]:
    """Groups for an optimizer; without `everything` vectors (biases, the scales of norms) do not decay.

    Goyal et al. 2017 leave out BatchNorm's; He et al. 2019, "Bag of Tricks for Image Classification", all vectors.
    """
    parameters = list(parameters)
    if everything:
        return [{"params": parameters, "weight_decay": weight_decay}]
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def peak_rate(config: OptimConfig, global_batch: int) -> float:
    """The highest rate of the run."""
    return scaled(config.lr, global_batch, config.reference_batch, config.name)


def set_rate(
    config: OptimConfig, optimizer: torch.optim.Optimizer, step: int, total: int, per_epoch: int, global_batch: int
) -> float:
    """Give the optimizer the rate of this step, and return it."""
    warmup = round(config.warmup_epochs * per_epoch)
    lr = rate(step, total, peak_rate(config, global_batch), warmup, config.final_lr)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
