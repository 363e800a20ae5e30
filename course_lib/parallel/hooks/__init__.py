"""Comm hooks: who averages a bucket of gradients instead of DDP's own all-reduce. docs/hooks.md compares them.

DDP calls `hook(state, bucket)` when a bucket is full, on each rank in the same order, and waits at the end of backward
for the future that it returns. Both arguments must have these names.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from course_lib.collectives import Communicator, TorchTransport
from course_lib.collectives.shared import SharedTransport
from course_lib.launch import named
from course_lib.parallel.hooks.onebit import OneBit, onebit_hook
from course_lib.parallel.hooks.own import Own, own_hook
from course_lib.parallel.hooks.powersgd import make_state, powersgd_hook

if TYPE_CHECKING:
    from course_lib.parallel.ddp_options import DDPOptions

__all__ = [
    "OneBit",
    "Own",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "onebit_hook",
    "own_hook",
    "powersgd_hook",
    "register",
]
_PATIENCE = 60.0  # seconds that the course's transports wait for another rank, where no option says otherwise


def register(model: DistributedDataParallel, options: "DDPOptions") -> None:
    """Register the hook that `options.comm_hook` names. All ranks together; "none" is nothing to do."""
    group, name = model.process_group, options.comm_hook
    if name in ("fp16", "bf16"):
        model.register_comm_hook(group, fp16_compress_hook if name == "fp16" else bf16_compress_hook)
    elif name == "powersgd":
        state = make_state(group, options.powersgd_rank, options.powersgd_start)
        model.register_comm_hook(state, powersgd_hook)
    elif name == "onebit":
        model.register_comm_hook(OneBit(group), onebit_hook)
    elif name in ("ring", "shared"):
        model.register_comm_hook(Own(Communicator(_transport(name, group, options))), own_hook)
    elif named.is_named(name):
        model.register_comm_hook(group, _one_s_own(name))


def _one_s_own(name: str) -> Callable[..., torch.futures.Future[torch.Tensor]]:
    """The hook that FILE.py:FUNCTION names; what is no future is a sentence, where torch only tells of a cast."""
    hook = named.function(name)

    @wraps(hook)
    def checked(state: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged = hook(state, bucket)
        if not isinstance(averaged, torch.futures.Future):
            raise TypeError(
                f"The comm hook {name} returned a {type(averaged).__name__}, and DDP needs a torch.futures.Future "
                "with the averaged bucket: future = torch.futures.Future(); future.set_result(tensor)."
            )
        return averaged

    return checked


def _transport(name: str, group: dist.ProcessGroup, options: "DDPOptions") -> TorchTransport | SharedTransport:
    if name == "ring":
        return TorchTransport(group)  # it waits as long as the group does
    return SharedTransport(group, timeout=options.timeout_s or _PATIENCE)
