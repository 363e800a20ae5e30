"""What the transports over sockets share: tasks that step until they are done, and nobody waits for ever."""

import select
import socket
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from course_lib.collectives.connect import PeerError
from course_lib.collectives.transport import COMBINE


class Task(Protocol):
    """One half of a message under way: `step` does what can be done without waiting and says whether that was
    anything; `waits()` gives the descriptor and the poll events to sleep for, and the reason in words."""

    done: bool

    def step(self) -> bool: ...
    def waits(self) -> tuple[int, int, str]: ...


class SocketTransport:
    """Base: `send`, `recv` and `exchange` of a Transport over two kinds of tasks, which a subclass gives.

    A rank that is silent for `timeout` seconds while it is waited for is a PeerError. After an error messages may
    be half-way, so the transport refuses to go on. One thread at a time may use it.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 1e6:
            raise ValueError(f"timeout={timeout!r}: give a positive number of seconds, at most a million.")
        if not dist.is_initialized():
            raise RuntimeError(f"{type(self).__name__} needs a process group: call dist.init_process_group(...) first.")
        self.rank, self.size, self.timeout = dist.get_rank(group), dist.get_world_size(group), timeout
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in this group, so it cannot make a transport for it.")
        self.sockets: dict[int, socket.socket] = {}
        self._broken: str | None = None

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to`."""
        self._move(self._sends(tensor, to))

    def recv(self, tensor: torch.Tensor, source: int, op: str | None = None) -> None:
        """Receive from rank `source`."""
        self._move(self._receives(tensor, source, op))

    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int, op: str | None = None) -> None:
        """Send `out` and receive `into` at the same time."""
        self._move(self._sends(out, to) + self._receives(into, source, op))

    def close(self) -> None:
        """Close all connections; ranks that still wait for this one then get an error."""
        self._broken = self._broken or "it has been closed"
        for sock in self.sockets.values():
            sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sends(self, tensor: torch.Tensor, to: int) -> list[Task]:
        self._check(tensor, to, None)
        return [self._sending(tensor, to)] if tensor.numel() else []

    def _receives(self, tensor: torch.Tensor, source: int, op: str | None) -> list[Task]:
        self._check(tensor, source, op)
        return [self._receiving(tensor, source, op)] if tensor.numel() else []

    def _sending(self, tensor: torch.Tensor, to: int) -> Task:
        raise NotImplementedError(f"{type(self).__name__} does not say how it sends.")

    def _receiving(self, tensor: torch.Tensor, source: int, op: str | None) -> Task:
        raise NotImplementedError(f"{type(self).__name__} does not say how it receives.")

    def _check(self, tensor: torch.Tensor, peer: int, op: str | None) -> None:
        flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.is_cpu and not tensor.requires_grad
        if self._broken or not flat or peer not in self.sockets or (op is not None and op not in COMBINE):
            raise self._refusal(tensor, peer, op)

    def _refusal(self, tensor: torch.Tensor, peer: int, op: str | None) -> Exception:
        name = type(self).__name__
        if self._broken:
            return PeerError(f"rank {self.rank} cannot use its {name} any more: {self._broken}.")
        if peer not in self.sockets:
            others = "there is no other rank" if self.size == 1 else f"the ranks are 0 to {self.size - 1}"
            return ValueError(f"rank {self.rank} has no connection to rank {peer}: {others}, and this is {self.rank}.")
        if op is not None and op not in COMBINE:
            return ValueError(f"op={op!r}: choose None or one of {', '.join(map(repr, COMBINE))}.")
        if tensor.requires_grad:
            return ValueError(f"{name} moves plain values: pass tensor.detach() of a tensor that requires grad.")
        return ValueError(
            f"{name} moves flat, contiguous CPU tensors, not one of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()} on {tensor.device}."
        )

    def _move(self, tasks: list[Task]) -> None:
        try:
            while tasks:
                moved = [task.step() for task in tasks]
                tasks = [task for task in tasks if not task.done]
                if tasks and not any(moved):
                    self._wait(tasks)
        except BaseException as error:  # an interrupt too leaves messages half-way
            self._broken = f"a call failed ({type(error).__name__}: {error})"
            raise

    def _wait(self, tasks: Sequence[Task]) -> None:
        poll, reasons = select.poll(), []
        masks: dict[int, int] = {}
        for task in tasks:
            fd, mask, reason = task.waits()
            masks[fd] = masks.get(fd, 0) | mask
            reasons.append(reason)
        for fd, mask in masks.items():
            poll.register(fd, mask)
        if not poll.poll(self.timeout * 1000):
            raise PeerError(f"nothing happened for {self.timeout:g} s: rank {self.rank} {', and '.join(reasons)}.")
