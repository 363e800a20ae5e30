"""The optimizer, how long it runs, and its learning rate."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from course_lib.train.errors import ConfigError
from course_lib.train.schedule import rate


@dataclass(frozen=True)
class OptimConfig:
    """Which optimizer, with which numbers, for how long."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    """The highest learning rate, for the whole global batch. It is never scaled behind your back."""
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
        ("label_smoothing", 0 <= config.label_smoothing < 1, "at least 0 and less than 1"),
    ]
    for name, holds, wanted in rules:
        if not holds:
            raise ConfigError(f"--optim.{name} must be {wanted}, but is {getattr(config, name)}.")
    if config.nesterov and config.momentum == 0:
        raise ConfigError("--optim.nesterov needs a momentum greater than 0, but --optim.momentum is 0.")


def build(config: OptimConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters that train."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    )


def set_rate(config: OptimConfig, optimizer: torch.optim.Optimizer, step: int, total: int, per_epoch: int) -> float:
    """Give the optimizer the rate of this step, and return it."""
    warmup = round(config.warmup_epochs * per_epoch)
    lr = rate(step, total, config.lr, warmup, config.final_lr)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
