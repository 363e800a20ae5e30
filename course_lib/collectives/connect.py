"""Give every two ranks of a group a connection of their own."""

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

_HELLO = 5.0  # seconds in which somebody who connects must say who it is


class PeerError(RuntimeError):
    """Another rank has gone, does not answer, or sends something else than expected. The text names it."""


def own_address() -> str:
    """The address from which this host reaches MASTER_ADDR. No packet is sent for that: UDP has no connection."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    family, _, _, _, there = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def host() -> tuple[str, str]:
    """(name, something that no other running host has)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text().strip() if boot.exists() else socket.gethostname()


@contextmanager
def unix_listener(ranks: int) -> Iterator[tuple[socket.socket, str]]:
    """A listening Unix socket and its address. On Linux that is no file; elsewhere one in a folder that goes again."""
    listener, name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"course-{secrets.token_hex(16)}"
    with nullcontext() if sys.platform == "linux" else tempfile.TemporaryDirectory(prefix="course-") as folder:
        address = f"\0{name}" if folder is None else f"{folder}/meet"
        listener.bind(address)
        listener.listen(ranks)
        yield listener, address


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
