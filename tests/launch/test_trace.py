"""What a run records of calls that no wrapper sees directly: DDP's own, futures, objects; and the direct start."""

import json
import os
import pickle
import random
import socket
import sys
import threading
import time

import cloudpickle
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.launch import RunError, arguments
from course_lib.launch.rank import main as rank_main
from course_lib.launch.supervise import supervisor

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file


def train(steps, leaves_early=False):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 512)))
    for _ in range(steps):
        if leaves_early and dist.get_rank() == 1:
            return None
        model(torch.randn(8, 64)).sum().backward()
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_all_reduces_of_ddp_are_recorded():
    result = run(train, 2, args=(3,))
    for rank, parameters in enumerate(result.results):
        sums = [m for m in result.messages if m.rank == rank and m.op == "all_reduce"]
        # DDP's documentation: one bucket in the first backward, then a first one of 1 MiB
        assert sums[0].nbytes == parameters and len(sums) == 5
        assert sum(m.nbytes for m in sums) == 3 * parameters
        assert all(m.where.startswith("test_trace.py, line ") and m.start <= m.end for m in sums)


def test_rank_that_leaves_ddp_alone_is_named():
    with pytest.raises(RunError, match=r"rank 0 waits in broadcast .* but rank 1 has returned without calling it"):
        run(train, 2, args=(2, True))


def all_kinds():
    from course_lib.launch.watch import observers

    seen, rank = [], dist.get_rank()
    observers.append(lambda phase, op, peer, tensor: seen.append((phase, op, peer, tensor.tolist())))
    out, into = torch.full((2,), float(rank)), torch.full((2,), -1.0)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)])
    for work in works:
        work.wait()
    total = dist.all_reduce(out, async_op=True).get_future().wait()[0].tolist()
    dist.all_gather_object([None, None], {"rank": rank})
    note = ["hello"] if rank == 0 else [None]
    dist.broadcast_object_list(note, src=0)
    group = dist.new_group([0, 1])
    dist.all_reduce(out, group=group)
    return seen, total, note


def test_observers_futures_and_objects():
    result = run(all_kinds, 2)
    for rank, (seen, total, note) in enumerate(result.results):
        other = 1 - rank
        mine, theirs, nothing = [float(rank)] * 2, [float(other)] * 2, [-1.0] * 2
        assert seen[:2] == [("start", "isend", other, mine), ("start", "irecv", other, nothing)]
        assert sorted(seen[2:]) == [("done", "irecv", other, theirs), ("done", "isend", other, mine)]
        assert total == [1.0, 1.0] and note == ["hello"]
        calls = {m.op: m for m in result.messages if m.rank == rank}
        assert all(m.end is not None for m in calls.values())
        assert calls["all_gather_object"].nbytes == len(pickle.dumps({"rank": rank}))
        assert calls["broadcast_object_list"].nbytes == (0 if rank else len(pickle.dumps("hello")))
        assert sum(m.op == "all_reduce" and m.rank == rank for m in result.messages) == 2


def helped_by_a_thread():
    """Both ranks wait to receive; a thread of each sends when a deadlock would long have been declared."""
    peer, box = 1 - dist.get_rank(), torch.zeros(1)
    helper = threading.Thread(target=lambda: (time.sleep(4), dist.send(torch.ones(1), peer)))
    helper.start()
    dist.recv(box, peer)
    helper.join()
    return box.item()


def test_a_thread_that_will_send_is_no_deadlock():
    assert run(helped_by_a_thread, 2).results == [1.0, 1.0]


def add():
    box = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(box)
    print("hello", flush=True)
    return box.item(), os.getppid()


def fails(how):
    if dist.get_rank() == 1:
        how()
    dist.barrier()


def test_direct_start(capsys):
    result = run(add, 3, start="direct")
    agent = supervisor()._process.pid
    assert result.results == [(6, agent)] * 3  # no torchrun in between
    assert result.output == ["hello\n"] * 3 and len(result.messages) == 3
    assert psutil.Process(agent).children() == []
    with pytest.raises(RunError, match="rank 1 left with exit code 7") as caught:
        run(fails, 3, args=(lambda: os._exit(7),), start="direct")
    assert caught.value.culprit == 1
    with pytest.raises(RunError, match="rank 1 failed: ZeroDivisionError"):
        run(fails, 3, args=(lambda: 1 / 0,), start="direct")
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run(fails, 3, args=(lambda: os.kill(os.getpid(), 9),), start="direct")
    with pytest.raises(ValueError, match="no nodes"):
        run(add, 2, nodes=2, start="direct")
    assert psutil.Process(agent).children() == []
    assert run(add, 2, start="direct").results == [(3, agent)] * 2


def test_a_port_that_is_taken_is_chosen_again(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        free, ports = arguments._free_port, [other.getsockname()[1]]
        monkeypatch.setattr(arguments, "_free_port", lambda: ports.pop() if ports else free())
        assert [value for value, _ in run(add, 2).results] == [3, 3]
        assert not ports
        monkeypatch.setattr(arguments, "_free_port", lambda: other.getsockname()[1])
        with pytest.raises(RunError, match="EADDRINUSE"):
            run(add, 2)


def test_a_rank_that_cannot_even_begin_says_why(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FileNotFoundError):
        rank_main(str(tmp_path))  # there is no plan.json
    story = json.loads((tmp_path / "rank_1.error").read_text())
    assert story["type"] == "FileNotFoundError" and "plan.json" in story["message"]


def unseeded():
    return torch.randn(1).item(), numpy.random.rand(), random.random()


def test_ranks_draw_other_numbers_as_new_processes_do():
    """They are forked from one process, whose generators they would share."""
    drawn = [numbers for start in ("auto", "direct") for numbers in run(unseeded, 2, start=start).results]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)
