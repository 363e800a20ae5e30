"""The knobs of torch's DistributedDataParallel that this course uses, and which of them do not go together."""

import inspect
import math
from dataclasses import dataclass

from course_lib.launch import named

HOOKS = ("none", "fp16", "bf16", "powersgd", "onebit", "ring", "shared")


@dataclass(frozen=True)
class DDPOptions:
    """How gradients are averaged. Lesson 07 measures each of these."""

    bucket_mb: float | None = None
    """Capacity of a bucket in MiB. None: torch's default, which is 25 but 1 for the first bucket. A number holds for
    the first one, too: so 25 is not the default."""
    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets: one copy of all gradients less. Then `grad.detach_()` is an error."""
    static_graph: bool = False
    """The same parameters are used in the same way in each step: unused ones need no search. Not with accumulation."""
    find_unused_parameters: bool = False
    """Walk through the graph before each backward, so that a step may leave parameters out. Costs time each step."""
    forward_sync_buffers: bool = True
    """Buffers (BatchNorm's statistics) of rank 0 go to all before a forward. torch once said broadcast_buffers."""
    comm_hook: str = "none"
    """How a bucket is averaged. none: by torch's all-reduce; fp16, bf16: in 16 bits; powersgd; onebit: with 1 bit an
    element; or exactly, ring: over the course's own ring, shared: over memory that the ranks of one host share; or
    FILE.py:FUNCTION: by a DDP comm hook of one's own, which gets the process group as its state."""
    powersgd_rank: int = 1
    """Rank of PowerSGD's matrices: more is more exact, and more bytes."""
    powersgd_start: int = 10
    """So many steps are averaged exactly before PowerSGD begins; 2 at least."""
    timeout_s: float | None = None
    """Seconds that a rank waits for the others in an all-reduce of gradients. None: as long as the process group that
    dist.init_process_group(timeout=...) made. A number makes a group of its own for gradients: DDP has no such knob,
    a time limit belongs to a group."""


DEFAULT = DDPOptions()


def check(options: DDPOptions, accumulate: int = 1) -> None:
    """Raise ValueError for the first value that cannot work, with the reason.

    accumulate  how many backwards make one update; all but the last are in `no_sync()`
    """
    for name in ("bucket_mb", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number greater than 0, or None, but is {value}.")
    _check_hook(options.comm_hook)
    for name, least in (("powersgd_rank", 1), ("powersgd_start", 2)):
        if getattr(options, name) < least:
            raise ValueError(f"{name} must be at least {least}, but is {getattr(options, name)}.")
    if options.static_graph and options.find_unused_parameters:
        raise ValueError(
            "static_graph and find_unused_parameters exclude each other: one says that each step uses the same "
            "parameters, the other searches for what this step leaves out. (static_graph finds those that are never "
            "used by itself.)"
        )
    if options.static_graph and accumulate > 1:
        raise ValueError(f"static_graph does not go with accumulation ({accumulate} backwards an update). {NO_SYNC}")


def _check_hook(name: str) -> None:
    if not named.is_named(name):
        if name not in HOOKS:
            raise ValueError(f"comm_hook must be one of {', '.join(HOOKS)}, or FILE.py:FUNCTION, but is {name!r}.")
        return
    try:
        inspect.signature(named.function(name)).bind("state", "bucket")
    except named.NoFunction as problem:
        raise ValueError(f"comm_hook {problem}") from None
    except TypeError:
        raise ValueError(f"comm_hook {name} must take two arguments, state and bucket, as DDP calls it.") from None


NO_SYNC = (
    "torch's DDP with static_graph learns the graph in its first backward, and stops with an internal error when that "
    "one is in no_sync(); nothing promises that a later one works. Leave static_graph out to accumulate."
)
