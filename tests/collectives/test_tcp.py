"""What only TCP has: addresses."""

import socket
import sys

import cloudpickle
import pytest
import torch

from course_lib import run
from course_lib.collectives.connect import own_address
from course_lib.collectives.tcp import TcpTransport

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(("master", "own"), [(None, "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_own_address_is_the_one_that_reaches_the_master(monkeypatch, master, own):
    if master == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 here")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master:
        monkeypatch.setenv("MASTER_ADDR", master)
    assert own_address() == own


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            return False
    return True


def addresses() -> list:
    """The ends of the connection on each address, whether it works, and the error for one that is not ours."""
    found = []
    for address in [None, "127.0.0.2" if sys.platform == "linux" else "127.0.0.1", *["::1"] * _has_ipv6()]:
        with TcpTransport(address=address) as t:
            x = torch.full((5,), float(t.rank))
            t.exchange(torch.full((5,), 10.0), 1 - t.rank, x, 1 - t.rank, "sum")
            sock = t.sockets[1 - t.rank]
            nodelay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            mine, theirs = sock.getsockname()[0], sock.getpeername()[0]
            # Rank 1 connects to the address of rank 0, from whichever of its own the system takes.
            found.append((address, mine if t.rank == 0 else theirs, nodelay, x.tolist()))
    try:
        TcpTransport(address="203.0.113.9")
    except ValueError as error:
        found.append(str(error))
    return found


def test_ranks_meet_at_the_address_given():
    for rank, (first, *others, refused) in enumerate(run(addresses, 2, quiet=True).results):
        assert first[1] == "127.0.0.1"
        assert all(end == address for address, end, *_ in others)
        assert all(nodelay and x == [10.0 + rank] * 5 for _, _, nodelay, x in [first, *others])
        assert refused.startswith("address='203.0.113.9' is none of this host")
