"""What NaiveDDP, BucketedDDP and OverlappedDDP share. How they average, and when, is in their own files."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from course_lib.collectives import Communicator
from course_lib.parallel import agree
from course_lib.parallel.link import connect


class DataParallelByHand(nn.Module):
    """A module whose gradients are averaged over all ranks. Made by all ranks together, from equal modules.

    module        on its device, with its dtype, frozen as it will be trained: all that before it is wrapped
    communicator  None: torch.distributed's default group; or a `course_lib.collectives.Communicator`
    bucket_mb     capacity of a bucket in MiB (2**20 bytes); a larger tensor gets a bucket of its own. (Not for
                  NaiveDDP, which has no buckets.)
    unused        a parameter that got no gradient on some rank. "error": `synchronize` raises a RuntimeError that
                  names it, the same on all ranks. "zero": ranks without a gradient count as zero; what no rank used
                  keeps its `.grad` as it was. So does torch's DDP with find_unused_parameters=True.

    Parameters and buffers of rank 0 go to all ranks once, here. Buffers (BatchNorm's statistics) go again before
    each forward that follows a synchronised one, as torch's DDP does by default (Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", VLDB 13(12), 2020, section 4.1). So call the model on all
    ranks or on none; to evaluate on one, call `model.module`.

        loss = criterion(model(x), y)
        loss.backward()
        model.synchronize()              # now .grad is the average over all ranks: clip it, look at it
        optimizer.step()

    `with model.no_sync():` around a backward keeps its gradients here; the next synchronised one carries the sum.

    Sums are made in the dtype of the gradients and then divided by the number of ranks: float16 overflows at 65504.
    Gradients are dense. `close()` takes the hooks off the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator | None = None,
        bucket_mb: float = 25.0,
        unused: str = "error",
    ) -> None:
        super().__init__()
        agree.check_arguments(module, bucket_mb, unused)
        named = agree.learnable(module)
        self.module, self.link, self._unused = module, connect(communicator), unused
        self.names, self.learnable = [name for name, _ in named], [p for _, p in named]
        agree.same_on_all_ranks(module, self.link)
        for tensor in [*module.parameters(), *module.buffers()]:
            agree.broadcast([tensor], self.link)  # one by one: together they would need their memory twice
        self._as_wrapped = agree.state(module)
        self._used: set[int] = set()  # numbers of the parameters that got a gradient since the last synchronize
        self._syncing, self._pending, self._buffers_next = True, False, True
        self.prepare(int(bucket_mb * 2**20) if bucket_mb < 2**40 else 2**60)
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(self, number)) for number, p in enumerate(self.learnable)
        ]

    def prepare(self, capacity: int) -> None:
        """Make the buckets, of so many bytes each."""

    def arrived(self, number: int) -> None:
        """A backward has just completed the gradient of `learnable[number]`."""

    def average(self) -> None:
        """Make each `.grad` the average over all ranks. None counts as zero."""
        raise NotImplementedError(f"{type(self).__name__} must say how it averages.")

    @property
    def syncing(self) -> bool:
        """Not inside `no_sync`."""
        return self._syncing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with the buffers of rank 0."""
        if torch.is_grad_enabled():
            agree.check_unchanged(self._as_wrapped, self.module)
            if self._pending:
                raise RuntimeError(
                    "The last backward was not followed by model.synchronize(), so its gradients are not averaged. "
                    "To gather gradients of several backwards, put all but the last in `with model.no_sync():`."
                )
        if self._buffers_next:
            agree.broadcast(self.module.buffers(), self.link)
        self._buffers_next = self._syncing and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only add to the gradients of this rank."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the gradients over all ranks; all ranks call it, after backward and before the optimizer's step."""
        if not self._syncing:
            raise RuntimeError("synchronize() was called inside no_sync(), which is there to leave it out.")
        unused = [number for number in range(len(self.learnable)) if number not in self._used]
        grads = {number: self.learnable[number].grad for number in unused}
        kept = {number: None if grad is None else grad.clone() for number, grad in grads.items()}
        try:
            self.average()
            counts = self._count_users()
        finally:
            self._used.clear()
            self._pending = False
        if self._unused == "error" and (text := agree.unused_text(self.names, counts, self.link.size)):
            raise RuntimeError(text)
        for number, grad in kept.items():
            if counts[number] == 0:
                self.learnable[number].grad = grad

    def _count_users(self) -> list[int]:
        """On how many ranks each parameter got a gradient: one more, small all-reduce of 4 bytes a parameter.

        Without it a rank could not know that another one left a parameter out.
        """
        users = [int(number in self._used) for number in range(len(self.learnable))]
        counts = torch.tensor(users, dtype=torch.int32, device=self.learnable[0].device)
        self.link.all_reduce(counts)
        return counts.tolist()

    def _gradient(self, number: int) -> None:
        if self.learnable[number].grad.layout != torch.strided:
            raise TypeError(f"The gradient of {self.names[number]} is sparse: only dense ones are averaged here.")
        self._used.add(number)
        self._pending = self._pending or self._syncing
        self.arrived(number)

    def close(self) -> None:
        """Take the hooks off the parameters and end the thread, if there is one; gradients stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self.link.close()


def _hook(model: DataParallelByHand, number: int) -> Callable[[torch.Tensor], None]:
    """The hook that a parameter calls when backward has completed its gradient: once a backward, also when tied.

    Its argument is the parameter itself, not the gradient. It must not keep the wrapper alive: hence weakly.
    """
    weak = weakref.ref(model)

    @torch.no_grad()
    def hook(_: torch.Tensor) -> None:
        if (model := weak()) is not None:
            model._gradient(number)

    return hook
