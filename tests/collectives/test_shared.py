"""What only shared memory has: tensors that are never copied, memory without a name, ranks of one host."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import run
from course_lib.collectives import bells, shared
from course_lib.collectives.communicator import ALGORITHMS, Communicator
from course_lib.collectives.segments import Segments, map_file, new_file
from course_lib.collectives.shared import DIRECT_FROM, SharedTransport

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def zero_copy() -> dict:
    """All-reduces of tensors from `empty`, the blocks that were copied for it, and the memory in use."""
    faults, copied = [], []
    rank, size = dist.get_rank(), dist.get_world_size()
    write = bells.Peer.write
    bells.Peer.write = lambda peer, part, total: (copied.append(part.nbytes), write(peer, part, total))
    with SharedTransport() as t:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = t.empty(900_001, dtype)
            for name, part in (("ring", tensor), ("halving", tensor[1:]), ("tree", tensor[7:-50_000])):
                assert name in ALGORITHMS
                part.copy_(torch.arange(part.numel()) % 50 + rank)
                Communicator(t, name).all_reduce(part)
                right = (torch.arange(part.numel()) % 50 * size + size * (size - 1) // 2).to(dtype)
                faults += [f"{name} {dtype}"] * (not torch.equal(part, right))
        big = list(copied)
        small = t.empty(DIRECT_FROM // 4 // 2)  # below the limit it is copied: waiting for the reader takes longer
        small.fill_(1.0)
        t.exchange(small, (rank + 1) % size, torch.empty_like(small), (rank - 1) % size)
    tensor.fill_(3)
    return {"faults": faults, "big": big, "small": copied[len(big) :], "after close": tensor.sum().item()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_in_shared_memory_are_read_where_they_lie(ranks):
    for found in run(zero_copy, ranks, watch=False).results:
        assert found["faults"] == []
        assert found["big"] == []
        assert found["small"] == [DIRECT_FROM // 2]
        assert found["after close"] == 3 * 900_001


def leave_a_trace(folder: str) -> list[str]:
    """Where the memory of a rank has a name, once a message has been sent and a tensor made."""
    tempfile.tempdir = folder
    with SharedTransport() as t:
        x = t.empty(100_000)
        x.fill_(1)
        Communicator(t).all_reduce(x)
        Communicator(t).all_reduce(torch.ones(10))
        maps = Path("/proc/self/maps").read_text().splitlines()
        names = [line.split(maxsplit=5)[5] for line in maps if "memfd:" in line]
        names += [str(Path(f"/proc/self/fd/{segment.file}").readlink()) for segment in t._segments.made]
        return [name for name in names if name != "/memfd:course (deleted)"] + [str(len(names))]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and memfd are Linux")
def test_the_memory_has_no_name(tmp_path):
    assert run(leave_a_trace, 2, args=(str(tmp_path),)).results == [["6"]] * 2  # slots and tensor: own, peer's, files
    assert list(tmp_path.iterdir()) == []


def on_other_hosts() -> str:
    shared.host = lambda: (f"machine{dist.get_rank()}", str(dist.get_rank()))
    try:
        SharedTransport()
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_of_two_hosts_are_refused():
    told = "SharedTransport is for ranks of one host: rank 0 runs on machine0, rank 1 on machine1."
    assert run(on_other_hosts, 2).results == [told] * 2


def bad_sizes() -> list[str]:
    told, t = [], SharedTransport()
    for numel in (-1, 2.5, True):
        try:
            t.empty(numel)
        except ValueError as error:
            told.append(str(error))
    return [*told, str(t.empty(0).shape), str(t.empty(3, torch.float16).dtype)]


def test_empty_takes_a_number_of_elements():
    *told, none, half = run(bad_sizes, 1).results[0]
    assert told == [f"numel={value}: give a whole number of elements, 0 or more." for value in ("-1", "2.5", "True")]
    assert (none, half) == ("torch.Size([0])", "torch.float16")


def test_memory_is_lent_again_once_no_tensor_uses_it():
    segments = Segments()
    first, memory = segments.borrow(10_000)
    view = torch.frombuffer(memory, dtype=torch.float32)[5:10]
    del memory
    gc.collect()
    second, memory = segments.borrow(10_000)
    other = torch.frombuffer(memory, dtype=torch.uint8, count=10_000)
    assert second is not first  # the view still lives
    assert segments.find(view) == (first, 20)
    assert segments.find(other[100:]) == (second, 100)
    assert segments.find(torch.zeros(5)) is None
    del view
    assert segments.borrow(9_000)[0] is first
    assert segments.borrow(10_000_000)[0] is segments.made[2]
    segments.close()
    assert other.fill_(1).sum() == 10_000


def test_two_maps_are_one_memory(monkeypatch):
    """Also in the way of systems without memfd."""
    for _ in range(2):
        file = new_file(5000)
        again = os.dup(file)
        one, other = map_file(file), map_file(again)
        one[4321] = 7
        assert other[4321] == 7
        assert len(other) == 5000
        monkeypatch.delattr(os, "memfd_create", raising=False)
