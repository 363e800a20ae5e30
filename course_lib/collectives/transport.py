"""What a collective needs from whoever moves the bytes: send, receive, and both at once.

The same algorithm runs over torch's point-to-point calls (here), plain TCP sockets (tcp.py), shared memory
(shared.py) and the simulator with a logical clock (simulate.py). Ranks are those of the group: 0 to size - 1.
"""

from typing import Protocol

import torch
import torch.distributed as dist

COMBINE = {"sum": torch.Tensor.add_, "max": lambda into, other: torch.maximum(into, other, out=into)}


class Transport(Protocol):
    """Moves contiguous one-dimensional tensors between the ranks of a group.

    Every call returns when its work is done: what was sent may be overwritten, what was received is there.
    `op` says what to do with what arrives: None stores it in the tensor, "sum" and "max" combine it with what the
    tensor holds. A peer that does not answer within the transport's timeout is an error that names it. Empty
    tensors are no messages: nothing is sent and nothing is waited for, on both sides.
    """

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to`."""

    def recv(self, tensor: torch.Tensor, source: int, op: str | None = None) -> None:
        """Receive from rank `source`: as many elements, of the same dtype, as the other side sends."""

    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int, op: str | None = None) -> None:
        """Send `out` and receive `into` at the same time, so that a circle in which everybody does so goes on."""


class TorchTransport:
    """Over `torch.distributed`'s isend and irecv, in the default group or the one given.

    What arrives to be combined lands in a scratch tensor first; it is allocated once and kept, one for each dtype.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to`."""
        if tensor.numel():
            dist.send(tensor, group=self._group, group_dst=to)

    def recv(self, tensor: torch.Tensor, source: int, op: str | None = None) -> None:
        """Receive from rank `source`."""
        if tensor.numel():
            landing = self._landing(tensor, op)
            dist.recv(landing, group=self._group, group_src=source)
            self._combine(tensor, landing, op)

    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int, op: str | None = None) -> None:
        """Send `out` and receive `into` at the same time."""
        landing = self._landing(into, op)
        sending = dist.isend(out, group=self._group, group_dst=to) if out.numel() else None
        if into.numel():
            dist.irecv(landing, group=self._group, group_src=source).wait()
            self._combine(into, landing, op)
        if sending:
            sending.wait()

    def _landing(self, tensor: torch.Tensor, op: str | None) -> torch.Tensor:
        if op is None:
            return tensor
        scratch = self._scratch.get(tensor.dtype)
        if scratch is None or scratch.numel() < tensor.numel() or scratch.device != tensor.device:
            scratch = self._scratch[tensor.dtype] = torch.empty_like(tensor)
        return scratch[: tensor.numel()]

    def _combine(self, tensor: torch.Tensor, landing: torch.Tensor, op: str | None) -> None:
        if op is not None:
            COMBINE[op](tensor, landing)
