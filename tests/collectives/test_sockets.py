"""What TCP and shared memory have in common: right values, and a sentence when a rank goes, is silent, or is wrong."""

import hashlib
import itertools
import os
import select
import signal
import socket
import sys
import tempfile
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import run
from course_lib.collectives import connect, sockets
from course_lib.collectives.communicator import ALGORITHMS, Communicator
from course_lib.collectives.connect import PeerError
from course_lib.collectives.operand import DTYPES
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport
from course_lib.launch import RunError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file
KINDS = {"tcp": TcpTransport, "shared": SharedTransport}
both = pytest.mark.parametrize("kind", KINDS)
# Elements: nothing, little, more than one block for the smallest and largest item, more than all slots of a pair.
CASES = [*itertools.product(DTYPES, [0, 7, 3001]), (torch.bfloat16, 280_001), (torch.int64, 280_001)]
CASES.append((torch.float32, 1_500_001))


def pattern(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every dtype, and so are their sums over a few ranks."""
    return ((torch.arange(length) * 7 + rank * 5) % 23).to(dtype)


def point_to_point(kind: str, size: int) -> list[str]:
    """What went wrong in sends and receives between any two of the first `size` ranks, and around their circle."""
    rank, group, faults = dist.get_rank(), dist.new_group(range(size)), []
    if rank >= size:
        return faults
    with KINDS[kind](group) as t:
        for dtype, length in CASES:
            mine = pattern(rank, length, dtype)
            for one, other in itertools.combinations(range(size), 2):
                if rank == one:
                    t.send(mine, other)
                elif rank == other:
                    got = torch.full((length,), -1, dtype=dtype)
                    t.recv(got, one)
                    if not torch.equal(got, pattern(one, length, dtype)):
                        faults.append(f"{one} to {other}, {length} of {dtype}")
            for op, left in itertools.product((None, "sum", "max"), [(rank - 1) % size] * (size > 1)):
                got, theirs = pattern(rank, length, dtype), pattern(left, length, dtype)
                t.exchange(mine, (rank + 1) % size, got, left, op)
                right = {None: theirs, "sum": mine + theirs, "max": torch.maximum(mine, theirs)}[op]
                if not torch.equal(got, right) or not torch.equal(mine, pattern(rank, length, dtype)):
                    faults.append(f"exchange {op}, {length} of {dtype}")
        if rank == 0:
            for number in range(300 * (size > 1)):  # far more than a rank may be ahead
                t.send(torch.tensor([number]), 1)
        elif rank == 1:
            time.sleep(0.05)
            got = torch.zeros(1, dtype=torch.int64)
            for number in range(300):
                t.recv(got, 0)
                faults += [f"message {number} was {got.item()}"] * (got.item() != number)
    return faults


@both
def test_messages_arrive_whole_and_in_order(kind):
    def work():
        return {size: point_to_point(kind, size) for size in (1, 2, 3)}

    assert run(work, 3, watch=False).results == [{1: [], 2: [], 3: []}] * 3


def reduce_everything(kind: str, size: int) -> list[tuple]:
    """Of each all-reduce of the first `size` ranks: algorithm, op, length, worst relative error against float64, and
    hash of the bits."""
    rank, found, whole = dist.get_rank(), [], dist.new_group(range(size))
    group = dist.new_group([size - 1, *range(1, size - 1)])  # without rank 0: group ranks are other numbers
    if rank >= size:
        return found
    with KINDS[kind](whole) as t:
        for name, op, length in itertools.product(ALGORITHMS, ("sum", "mean", "max"), (1, 5, 100_003)):
            options = {"node_size": size if size % 2 else 2} if name == "hierarchical" else {}
            found.append((name, op, length, *_reduced(Communicator(t, name, **options), op, length, whole)))
    if rank:
        with KINDS[kind](group) as t:
            found.append(("subgroup", "sum", 1003, *_reduced(Communicator(t), "sum", 1003, group)))
            assert t.rank == dist.get_rank(group)
    return found


def _reduced(communicator: Communicator, op: str, length: int, group) -> tuple[float, str]:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(17 * dist.get_rank() + length))
    oracle = tensor.double()
    dist.all_reduce(oracle, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
    if op == "mean":
        oracle /= communicator.size
    communicator.all_reduce(tensor, op)
    error = ((tensor - oracle).abs() / (1 + oracle.abs())).max().item()
    return error, hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@both
def test_every_algorithm_runs_over_it(kind):
    def work():
        return {size: reduce_everything(kind, size) for size in (3, 4)}

    results = run(work, 4, watch=False).results
    for size in (3, 4):
        founds = [result[size] for result in results[:size]]
        assert max(error for found in founds for *_, error, _ in found) < 1e-6
        bits = [[(*case, digest) for *case, _, digest in found] for found in founds]
        assert len(bits[1]) == len(bits[0]) + 1 > 1  # rank 0 is not in the subgroup
        for cases in itertools.zip_longest(*bits):
            assert len({case for case in cases if case}) == 1


def misuse(kind: str) -> list[str]:
    """The errors of calls that cannot be; afterwards the transport still works."""
    t, x = KINDS[kind](), torch.zeros(4)
    big = t.empty(100_000) if kind == "shared" else torch.empty(100_000)
    calls = [
        lambda: t.send(x, t.rank),
        lambda: t.send(x, 2),
        lambda: t.recv(x[::2], 1 - t.rank),
        lambda: t.recv(x.view(2, 2), 1 - t.rank),
        lambda: t.recv(x, 1 - t.rank, "product"),
        lambda: t.exchange(big, 1 - t.rank, x[::2], 1 - t.rank),  # nothing of the good half may leave
        lambda: t.send(x.clone().requires_grad_(), 1 - t.rank),
        lambda: KINDS[kind](timeout=0),
        lambda: KINDS[kind](timeout="soon"),
    ]
    told = [_error(call) for call in calls]
    t.exchange(torch.ones(4), 1 - t.rank, x, 1 - t.rank)
    t.close()
    return [*told, f"ones: {torch.equal(x, torch.ones(4))}", _error(lambda: t.send(x, 1 - t.rank))]


def _error(call) -> str:
    try:
        call()
    except (PeerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@both
def test_a_call_that_cannot_be_is_a_sentence(kind):
    itself, third, strided, shape, op, half, grad, zero, soon, works, closed = run(misuse, 2, args=(kind,)).results[0]
    assert "no connection to rank 0: the ranks are 0 to 1, and this is 0." in itself
    assert "no connection to rank 2" in third
    assert "flat, contiguous CPU tensors, not one of shape (2,)" in strided
    assert "not one of shape (2, 2)" in shape
    assert "op='product': choose None or one of 'sum', 'max'." in op
    assert "not one of shape (2,)" in half
    assert "pass tensor.detach()" in grad
    assert "timeout=0: give a positive number of seconds" in zero
    assert "timeout='soon'" in soon
    assert works == "ones: True"
    assert closed.startswith("PeerError: rank 0 cannot use its") and "it has been closed" in closed


def trouble(kind: str) -> list[str]:
    """What rank 0 hears when rank 1 sends too much, keeps silent, does not read, or leaves."""
    told = []
    for number in range(5):
        t = KINDS[kind](timeout=0.3 if number in (1, 2) else 60)
        dist.barrier()
        if dist.get_rank() == 0:
            big = torch.zeros(30_000_000)
            call = [
                lambda t=t: t.recv(torch.zeros(100), 1),
                lambda t=t: t.recv(torch.zeros(100), 1, "sum"),
                lambda t=t, big=big: t.send(big, 1),
                lambda t=t: t.recv(torch.zeros(100), 1),
                lambda t=t, big=big: t.send(big, 1),
            ][number]
            told += [_error(call), _error(call)]
        elif number == 0:
            t.send(torch.zeros(50), 0)
        elif number > 2:
            t.close()
        dist.barrier()
        t.close()
    return told


@both
def test_a_rank_that_does_not_do_its_part_is_named(kind):
    told = run(trouble, 2, args=(kind,)).results[0]
    length, silent, unread, left, refused = told[::2]
    assert "rank 1 sends 200 bytes where 400 are expected: all ranks must call" in length
    assert silent == (
        "PeerError: nothing happened for 0.3 s: rank 0 waits for rank 1, from which 0 of 400 bytes have arrived."
    )
    assert "nothing happened for 0.3 s: rank 0 waits to send to rank 1, which has" in unread
    assert "rank 1 has closed its connection" in left
    assert "rank 1 has closed its connection" in refused
    assert all("cannot use its" in again and "a call failed (PeerError: " in again for again in told[1::2])


def killed(kind: str, folder: str) -> None:
    tempfile.tempdir = folder
    with KINDS[kind]() as t:
        x = torch.ones(1000)
        Communicator(t).all_reduce(x)
        if t.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        t.recv(x, 1)


@both
def test_a_killed_rank_is_noticed_and_leaves_nothing(kind, tmp_path):
    with pytest.raises(RunError, match=r"^rank 1 was killed by SIGKILL") as caught:  # not the one that noticed
        run(killed, 2, args=(kind, str(tmp_path)))
    assert caught.value.culprit == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hello", "who"),
    [
        (b"t" * 16 + b"\x03\0\0\0", 3),
        (b"x" * 16 + b"\x03\0\0\0", None),
        (b"GET / HTTP/1.1\r\nHost: a", None),
        (b"", None),
    ],
)
def test_a_stranger_is_no_rank(hello, who):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(hello)
        theirs.shutdown(socket.SHUT_WR)
        assert connect._who(ours, b"t" * 16) == who


def test_a_wait_for_two_halves_of_one_socket_sees_both():
    """With two ranks the right and the left neighbour are one connection: one set of events, both reasons."""
    ours, theirs = socket.socketpair()

    class Half:
        def __init__(self, mask, words):
            self.waits = lambda: (ours.fileno(), mask, words)

    transport = sockets.SocketTransport.__new__(sockets.SocketTransport)
    transport.rank, transport.timeout = 0, 0.05
    with ours, theirs:
        with pytest.raises(PeerError, match="rank 0 waits a, and waits b"):
            transport._wait([Half(select.POLLIN, "waits a"), Half(select.POLLIN, "waits b")])
        transport._wait([Half(select.POLLIN, "a"), Half(select.POLLOUT, "b")])  # writable: returns at once
        theirs.send(b"x")
        transport._wait([Half(select.POLLIN, "a")])
