"""What a collective needs from whoever moves the bytes: send, receive, and both at once.

The same algorithm runs over torch's point-to-point calls (here), plain TCP sockets (tcp.py), shared memory
(shared.py) and the simulator with a logical clock (simulate.py). Ranks are those of the group: 0 to size - 1.
"""

from collections.abc import Sequence
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
        """Send `out` and receive `into` at the same time, so that a circle in which everybody does so goes on.

        The two must not overlap in memory.
        """


class TorchTransport:
    """Over `torch.distributed`'s isend and irecv, in the default group or the one given.

    What arrives to be combined lands in a scratch tensor first. It is allocated once and kept, one for each dtype
    and device: so keep the transport, too, when you call a collective many times.

    The time limit is the group's. Gloo stops a rank that receives more bytes than it expects ("Received data size
    doesn't match expected size") but not one that receives fewer. Each algorithm here sends both ways between
    ranks, or around a circle, so when lengths differ at least one rank is stopped, unless a chunk is empty.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise ValueError(f"Rank {dist.get_rank()} is not in this group, so it cannot take part.")
        self.size = dist.get_world_size(self._group)
        self._scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to`."""
        if tensor.numel():
            dist.send(tensor, group=self._group, group_dst=to)

    def recv(self, tensor: torch.Tensor, source: int, op: str | None = None) -> None:
        """Receive from rank `source`."""
        if tensor.numel():
            landing = self._landing(tensor, op)
            dist.recv(landing, group=self._group, group_src=source)
            _combine(tensor, landing, op)

    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int, op: str | None = None) -> None:
        """Send `out` and receive `into` at the same time."""
        landing = self._landing(into, op)
        calls = [dist.P2POp(dist.irecv, landing, group=self._group, group_peer=source)] if into.numel() else []
        if out.numel():
            calls.append(dist.P2POp(dist.isend, out, group=self._group, group_peer=to))
        if not calls:
            return
        # As a batch: NCCL runs the calls of one batch together, and others one after the other, which may never end.
        works = dist.batch_isend_irecv(calls)
        works[0].wait()  # gloo: the receive alone, so that the sum is made while the rest is sent; NCCL: all
        if into.numel():
            _combine(into, landing, op)
        for work in works[1:]:
            work.wait()

    def _landing(self, tensor: torch.Tensor, op: str | None) -> torch.Tensor:
        if op is None:
            return tensor
        key = (tensor.dtype, tensor.device)
        if key not in self._scratch or self._scratch[key].numel() < tensor.numel():
            self._scratch[key] = torch.empty_like(tensor)
        return self._scratch[key][: tensor.numel()]


def _combine(tensor: torch.Tensor, landing: torch.Tensor, op: str | None) -> None:
    if op is not None:
        COMBINE[op](tensor, landing)


def chosen(transport: Transport | None) -> Transport:
    """What the caller of a collective gave; None is torch.distributed's default group. TypeError for anything else."""
    if transport is None:
        return TorchTransport()
    if isinstance(transport, type) or not all(hasattr(transport, name) for name in ("rank", "size")):
        raise TypeError(
            f"transport={transport!r}: give None for torch.distributed, or an object such as TcpTransport() or "
            "SharedTransport(), made on each rank."
        )
    return transport


class Sub:
    """Some ranks of a transport as a group of their own: `ranks[k]` is rank k in it.

    Each of these ranks makes its own Sub with the same list; nothing is sent for it. Raises ValueError when the
    own rank is not in the list, or a rank is there twice or does not exist.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport, self._ranks = transport, list(ranks)
        if len(set(self._ranks)) != len(self._ranks) or not set(self._ranks) <= set(range(transport.size)):
            raise ValueError(f"ranks={self._ranks}: give each of the ranks 0 to {transport.size - 1} at most once.")
        if transport.rank not in self._ranks:
            raise ValueError(f"Rank {transport.rank} is not among ranks={self._ranks}, so it cannot take part.")
        self.rank, self.size = self._ranks.index(transport.rank), len(self._ranks)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to` of the group."""
        self._transport.send(tensor, self._ranks[to])

    def recv(self, tensor: torch.Tensor, source: int, op: str | None = None) -> None:
        """Receive from rank `source` of the group."""
        self._transport.recv(tensor, self._ranks[source], op)

    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int, op: str | None = None) -> None:
        """Send and receive at the same time, within the group."""
        self._transport.exchange(out, self._ranks[to], into, self._ranks[source], op)
