"""What the transports over sockets share: every two ranks of a group get a connection, and nobody waits for ever."""

import secrets
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from course_lib.collectives.transport import COMBINE

_HELLO = 5.0  # seconds in which somebody who connects must say who it is


class PeerError(RuntimeError):
    """Another rank has gone, does not answer, or sends something else than expected. The text names it."""


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


def meet(group: dist.ProcessGroup | None, card: Any) -> list[Any]:
    """What each rank of the group has put on its card, in order of their ranks in the group."""
    cards: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(cards, card, group=group)
    return cards


def connect(
    listener: socket.socket, address: Any, group: dist.ProcessGroup | None, timeout: float
) -> dict[int, socket.socket]:
    """A connected, non-blocking socket to each other rank. All ranks of the group call this together.

    listener  bound and listening at `address`, which the others can reach; closed here
    Each rank connects to the ranks below it and accepts those above. Who connects shows the token that went
    through the process group, so that a stranger on the same machine is not taken for a rank.
    """
    rank, limit = dist.get_rank(group), time.monotonic() + timeout
    token = secrets.token_bytes(16)
    found: dict[int, socket.socket] = {}
    try:
        cards = meet(group, (listener.family, address, token))
        for peer, (family, there, secret) in enumerate(cards[:rank]):
            found[peer] = sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(max(limit - time.monotonic(), 0.01))
            try:
                sock.connect(there)
                sock.sendall(secret + rank.to_bytes(4, "little"))
            except OSError as error:
                raise PeerError(f"rank {rank} could not connect to rank {peer} at {there!r}: {error}.") from error
        while missing := [k for k in range(rank + 1, len(cards)) if k not in found]:
            listener.settimeout(max(limit - time.monotonic(), 0.01))
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                raise PeerError(f"rank {rank} waited {timeout:g} s for rank {missing[0]} to connect.") from None
            if (peer := _who(sock, token)) in missing:
                found[peer] = sock
            else:
                sock.close()
    except BaseException:
        for sock in found.values():
            sock.close()
        raise
    finally:
        listener.close()
    for sock in found.values():
        sock.setblocking(False)
    return found


def _who(sock: socket.socket, token: bytes) -> int | None:
    """The rank that has connected, or None for a stranger."""
    sock.settimeout(_HELLO)
    hello = b""
    try:
        while len(hello) < 20 and (part := sock.recv(20 - len(hello))):
            hello += part
    except OSError:
        return None
    known = len(hello) == 20 and secrets.compare_digest(hello[:16], token)
    return int.from_bytes(hello[16:], "little") if known else None
