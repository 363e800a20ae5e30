"""Computing in 16 bits: autocast for the forward, and for fp16 a scaler that keeps small gradients from vanishing.

Parameters, gradients, optimizer and all-reduces stay in float32, so 16 bits save time and activations, but no byte
between ranks: for that there are comm hooks (`ddp.comm_hook`).
"""

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.amp import GradScaler

from course_lib.train.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class AmpConfig:
    """In how many bits the forward computes (Micikevicius et al. 2018, "Mixed Precision Training")."""

    dtype: Literal["none", "bf16", "fp16"] = "none"
    """bf16 has the range of float32 and needs no scaler; fp16 ends at 65504 and gets one."""
    scale: float = 2.0**16
    """fp16: the first factor of the loss. It is halved when a gradient overflows on any rank: that step is skipped
    by all ranks."""
    growth_interval: int = 2000
    """fp16: after so many steps without an overflow the factor is doubled."""


def check(config: AmpConfig, model_dtype: str) -> None:
    """Raise ConfigError for what cannot work."""
    if config.dtype != "none" and model_dtype != "float32":
        raise ConfigError(
            f"--amp.dtype {config.dtype} computes in 16 bits what --model.dtype {model_dtype} should compute in 64; "
            "use --model.dtype float32."
        )
    if not 0 < config.scale < math.inf:
        raise ConfigError(f"--amp.scale must be greater than 0 and finite, but is {config.scale}.")
    if config.growth_interval < 1:
        raise ConfigError(f"--amp.growth_interval must be at least 1, but is {config.growth_interval}.")


def autocast(config: AmpConfig, device: torch.device) -> Callable[[], AbstractContextManager]:
    """What to put around each forward."""
    if config.dtype == "none":
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, DTYPES[config.dtype])


def scaler(config: AmpConfig, device: torch.device) -> GradScaler:
    """Without fp16 one whose methods do nothing.

    The ranks agree on an overflow with an all-reduce of 4 bytes. torch's all-reduce would spread an inf by itself; a
    comm hook that compresses need not.
    """
    if config.dtype != "fp16":
        return GradScaler(device.type, enabled=False)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # a long import that others do without

    return ShardedGradScaler(device.type, init_scale=config.scale, growth_interval=config.growth_interval)
