"""Pipeline parallelism: run one stage of a model by a schedule, with send and receive between neighbours.

The gradients are those of the whole model on the whole batch. For schedules and sources see `pipeline_schedule`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel.pipeline_schedule import Op


class PipelineStage:
    """This rank's layers, one stage: rank 0 of `group` has the first layers, its last rank the last.

    module    [samples, ...] → [samples, ...]; each sample by itself, so no BatchNorm
    arrives   one sample as this stage gets it, for its shape, dtype and device; values are not looked at
    loss      (output, targets) → the mean over samples; called on the last stage only

    Only for gloo, on the CPU. Its sends do not wait for a receiver and its tags keep messages apart. NCCL's do wait,
    one after the other, so two neighbours that send to each other would wait for ever, unless a send and a receive are
    started together, by `batch_isend_irecv`.
    """

    def __init__(
        self,
        module: nn.Module,
        arrives: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if arrives.device.type != "cpu":
            raise ValueError(f"This pipeline sends from the CPU, by gloo, but its samples arrive on {arrives.device}.")
        self.module, self.arrives, self.loss, self.group = module, arrives, loss, group
        self.stage, self.last = dist.get_rank(group), dist.get_world_size(group) - 1
        self.peak = 0  # microbatches whose activations were kept at once, in the last run

    def run(self, ops: Sequence[Op], inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """One forward and backward of the batch; gradients are added to `.grad`. Returns the loss on the last stage.

        ops       this stage's: `one_f_one_b(stages, microbatches)[stage]`
        inputs    [samples, ...], the same number on all ranks; only the first stage looks at values
        targets   [samples, ...]; only the last stage looks at values

        The batch is cut into as many microbatches as `ops` name; where they do not divide it, the first are larger by
        one sample. Each one's loss counts by its samples, so that they add up to the mean over the batch.
        """
        microbatches = 1 + max(op.microbatch for op in ops)
        if len(inputs) < microbatches:
            raise ValueError(f"{len(inputs)} samples cannot be cut into {microbatches} microbatches.")
        self._inputs, self._targets = inputs.tensor_split(microbatches), targets.tensor_split(microbatches)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # microbatch: what came in, what went out
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []  # a tensor must live until it is sent
        self._samples, self._loss, self.peak = len(inputs), 0.0, 0
        for op in ops:
            (self._forward if op.kind == "forward" else self._backward)(op.microbatch)
            self.peak = max(self.peak, len(self._kept))
        for work, _ in self._sent:
            work.wait()
        return self._loss if self.stage == self.last else None

    def _forward(self, m: int) -> None:
        """Activations come from the stage before and go to the stage behind, or into the loss."""
        x = self._inputs[m]
        if self.stage > 0:
            x = self._receive(self.stage - 1, m, self.arrives.new_empty(len(x), *self.arrives.shape))
            x.requires_grad_()
        y = self.module(x)
        if self.stage == self.last:
            y = self.loss(y, self._targets[m]) * (len(x) / self._samples)
            self._loss += y.item()
        else:
            self._send(self.stage + 1, m, y.detach())
        self._kept[m] = (x, y)

    def _backward(self, m: int) -> None:
        """The gradient of the output comes from the stage behind, that of the input goes to the stage before."""
        x, y = self._kept.pop(m)  # what it held is free after this
        tag = len(self._inputs) + m
        y.backward(None if self.stage == self.last else self._receive(self.stage + 1, tag, torch.empty_like(y)))
        if self.stage > 0:
            self._send(self.stage - 1, tag, x.grad)

    def _send(self, stage: int, tag: int, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group=self.group, group_dst=stage, tag=tag), tensor))

    def _receive(self, stage: int, tag: int, buffer: torch.Tensor) -> torch.Tensor:
        """Wait at most as long as the process group's time limit."""
        dist.recv(buffer, group=self.group, group_src=stage, tag=tag)
        return buffer
