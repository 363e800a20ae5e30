"""From gradients to weights, in the one order that is right.

backward -> unscale -> clip -> finite on all ranks? -> step -> update the scale

Clipping before the unscaling would clip numbers that are 65536 times too large, and so nearly all of them. Clipping
before the average, on each rank, would give another direction.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_

from course_lib.train.errors import Diverged

SMALLEST_SCALE = 2.0**-14  # where gradients of 65504 * 2**14, a thousand millions, overflow


@dataclass
class Update:
    """Called after the last backward of a step, by all ranks."""

    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    parameters: list[nn.Parameter]
    clip: float = 0.0  # the largest norm of all gradients together; 0: any
    skipped: int = 0  # steps that an overflow cost since the start of this process

    def __call__(self, want_norm: bool = False) -> torch.Tensor | None:
        """One step of the optimizer; returns the norm of the gradients before clipping, when it is known or wanted.

        The norm stays on the device: nobody waits for a GPU.
        """
        self.scaler.unscale_(self.optimizer)
        norm = self._norm() if want_norm or self.clip else None
        if self.clip:
            clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.scaler.step(self.optimizer)  # does nothing when a gradient of any rank is inf or nan
        self._update_scale()
        self.optimizer.zero_grad()
        return norm

    def _norm(self) -> torch.Tensor:
        # torch.nn.utils.get_total_norm sorts them by device and dtype first, which takes longer than all of this.
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        return torch.linalg.vector_norm(torch.stack(norms))

    def _update_scale(self) -> None:
        if self.scaler.is_enabled():
            before = self.scaler.get_scale()
            self.scaler.update()
            now = self.scaler.get_scale()
            self.skipped += now < before
            if now < SMALLEST_SCALE:  # the same on all ranks
                raise Diverged(
                    f"gradients overflow fp16 in step after step: the factor of the loss has come down to {now:g}; a "
                    "smaller --optim.lr may help, or --amp.dtype bf16"
                )
