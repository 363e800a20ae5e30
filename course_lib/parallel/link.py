"""How data parallelism by hand reaches the other ranks: through torch.distributed, or through the course's own
collectives. Both start a sum and let the caller compute on until `wait()`."""

import queue
import threading
import weakref
from concurrent.futures import Future
from typing import Protocol

import torch
import torch.distributed as dist

from course_lib.collectives import Communicator


class Work(Protocol):
    """A sum under way."""

    def wait(self) -> object:
        """Return when the tensor holds the sum; raise what went wrong."""


class TorchLink:
    """torch.distributed's default group."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("There is no process group yet: call dist.init_process_group(...) first.")
        self.size = dist.get_world_size()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Sum or max over all ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)

    def start(self, tensor: torch.Tensor) -> Work:
        """Begin a sum, in place. All ranks start the same ones in the same order."""
        return dist.all_reduce(tensor, async_op=True)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """All ranks get the tensor of rank 0."""
        dist.broadcast(tensor, group_src=0)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor that is good to send from."""
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """There is nothing to let go of."""


class OwnLink:
    """A Communicator of the course. Its calls return when they are done, so a thread makes those of `start`.

    One thread and a queue: the sums run in the order in which they were started, on each rank the same. The main
    thread uses the communicator only when nothing is started: a transport serves one thread at a time.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self.size = communicator, communicator.size
        self._jobs: queue.SimpleQueue | None = None

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Sum or max over all ranks, in place."""
        self._communicator.all_reduce(tensor, op)

    def start(self, tensor: torch.Tensor, op: str = "sum") -> "_Started":
        """Begin a sum or a mean, in place. All ranks start the same ones in the same order."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            # A daemon never keeps a rank alive; and when this link is gone, so is the thread.
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs, self._communicator), name="all-reduce", daemon=True
            )
            self._thread.start()
            self._end = weakref.finalize(self, self._jobs.put, None)
        sum_ = _Started(tensor, op)
        self._jobs.put(sum_)
        return sum_

    def broadcast(self, tensor: torch.Tensor) -> None:
        """All ranks get the tensor of rank 0."""
        self._communicator.broadcast(tensor)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor that is good to send from: in shared memory, if that is how the communicator sends."""
        transport = self._communicator.transport
        if device.type == "cpu" and hasattr(transport, "empty"):
            return transport.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """End the thread. It first finishes what was started, within the time limit of the transport."""
        if self._jobs is not None:
            self._end()
            self._thread.join()
            self._jobs = None


class _Started:
    """A sum that the thread will make. Its `future` belongs to whoever wants to be told instead of waiting."""

    def __init__(self, tensor: torch.Tensor, op: str) -> None:
        self.tensor, self.op, self.future = tensor, op, Future()

    def wait(self) -> None:
        # Without a limit of its own: the transport has one, and its error says for whom it waited.
        self.future.result()


def _serve(jobs: queue.SimpleQueue, communicator: Communicator) -> None:
    """The thread: make one sum after the other. After a failure the others are not tried: bytes may be half-way."""
    broken: Exception | None = None
    while (job := jobs.get()) is not None:
        try:
            if broken is not None:
                raise broken
            if job.tensor.is_cuda:
                torch.cuda.set_device(job.tensor.device)  # the current device is each thread's own
            communicator.all_reduce(job.tensor, job.op)
        except Exception as error:  # noqa: BLE001 - wait() raises it where the caller can see it
            broken = error
            job.future.set_exception(error)
        else:
            job.future.set_result(None)


def connect(communicator: Communicator | None) -> TorchLink | OwnLink:
    """The link for what the user gave."""
    if communicator is None:
        return TorchLink()
    if isinstance(communicator, Communicator):
        return OwnLink(communicator)
    raise TypeError(
        f"communicator is a {type(communicator).__name__}: give None for torch.distributed, or a "
        "course_lib.collectives.Communicator. (For a process group: Communicator(TorchTransport(group)).)"
    )
