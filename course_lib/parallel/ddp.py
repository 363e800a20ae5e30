"""torch's DistributedDataParallel, wrapped so that a run is the same run after a restart, and mistakes are refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.parallel import hooks
from course_lib.parallel.ddp_options import DEFAULT, NO_SYNC, DDPOptions, check

__all__ = ["CheckedDDP", "DDPOptions", "check", "gradient_bytes", "settle_buckets", "sync_buffers", "wrap"]


class CheckedDDP(DistributedDataParallel):
    """torch's DDP, which raises a RuntimeError where torch would go wrong in silence or with an internal error."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._hook_name: str | None = None
        self._as_wrapped = [
            (parameters, name, p, p.dtype, p.device, p.requires_grad)
            for parameters in (layer._parameters for layer in module.modules())
            for name, p in parameters.items()
            if p is not None
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. First a look at each parameter, which takes well under a microsecond for each."""
        if torch.is_grad_enabled():
            for parameters, name, p, dtype, device, learns in self._as_wrapped:
                now = parameters.get(name)
                if now is not p or p.dtype != dtype or p.device != device or p.requires_grad != learns:
                    raise RuntimeError(self._changed())
        return super().forward(*args, **kwargs)

    def _changed(self) -> str:
        names = {id(p): name for name, p in self.module.named_parameters()}
        bad = [
            names.get(id(p), f"{name} (replaced)")
            for parameters, name, p, *state in self._as_wrapped
            if parameters.get(name) is not p or [p.dtype, p.device, p.requires_grad] != state
        ]
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        return (
            f"{', '.join(bad[:3])}{more} changed after the module was wrapped (moved to another dtype or device, "
            "frozen or unfrozen, replaced). DDP's hooks sit on the parameters as they were, so gradients would not be "
            "averaged, and nobody would be told. Do that first, then wrap."
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards whose *forward* was in here only add to the gradients of this rank."""
        if self.static_graph:
            raise RuntimeError(f"no_sync() does not go with static_graph. {NO_SYNC}")
        return super().no_sync()

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Let `hook(state, bucket)` average the buckets. One for each model."""
        name = getattr(hook, "__name__", type(hook).__name__)
        if self._hook_name:
            raise RuntimeError(
                f"This model has the comm hook {self._hook_name} already, and DDP takes only one, so {name} was not "
                "registered. Let one hook call the other (torch's fp16_compress_wrapper does so)."
            )
        super().register_comm_hook(state, hook)
        self._hook_name = name


def wrap(module: nn.Module, example: torch.Tensor, options: DDPOptions = DEFAULT) -> CheckedDDP:
    """Wrap a module that is already on its device; `example` is a batch of the right shape, dtype and device.

    Parameters and buffers of rank 0 go to all ranks, so ranks that were built differently become equal. Move the
    module, change its dtype and freeze *before*: afterwards DDP's hooks sit on parameters as they were, and the next
    forward raises a RuntimeError that names them.

    Raises ValueError for options that do not go together; see `DDPOptions` and `check`. And TypeError for what is no
    module, is one that was wrapped before (gradients would be averaged twice), or does not return a tensor; and
    RuntimeError when there is no process group yet.
    """
    if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
        raise TypeError(f"module is a {type(module).__name__}: give a torch.nn.Module that is not wrapped yet.")
    check(options)
    if not dist.is_initialized():
        raise RuntimeError("wrap() needs the process group: call torch.distributed.init_process_group before it.")
    group = None if options.timeout_s is None else dist.new_group(timeout=timedelta(seconds=options.timeout_s))
    device = example.device
    model = CheckedDDP(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        forward_sync_buffers=options.forward_sync_buffers,
    )
    settle_buckets(model, example)
    if options.comm_hook != "none":  # now, so that a hook that remembers sees the final buckets only
        hooks.register(model, options)
    return model


def settle_buckets(model: DistributedDataParallel, example: torch.Tensor) -> None:
    """One forward and backward whose result is thrown away; two with static_graph, which looks at the second one.

    DDP learns in its first backward in which order gradients arrive and groups them into other buckets from
    then on. With three or more ranks another bucket means another order of additions, so the first step after
    a restart would differ in its last bits from the same step of a straight run. After this call every step
    is an ordinary one. Evaluation mode: BatchNorm statistics and dropout's random numbers stay untouched.
    """
    training = model.training
    model.eval()
    for _ in range(2 if model.static_graph else 1):
        output = model(torch.zeros_like(example))
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"{type(model.module).__name__} returns a {type(output).__name__}: a tensor is needed.")
        (output.sum() * 0).backward()
        model.zero_grad(set_to_none=True)
    model.train(training)


@torch.no_grad()
def sync_buffers(module: nn.Module) -> None:
    """Give all ranks the buffers (BatchNorm's statistics) of rank 0, as DDP does before a training forward.

    Each rank updated its own from its own samples; without this each would evaluate another model.
    """
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def gradient_bytes(module: nn.Module) -> int:
    """Bytes that an all-reduce of all gradients carries.

    What each step sends through the ring, before 2(N-1)/N.
    """
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
