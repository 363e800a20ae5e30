"""Communicator: one object for all algorithms; its check of lengths; its hook under DDP."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.collectives import Communicator
from course_lib.collectives.communicator import ALGORITHMS

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_bad_arguments(alone):
    with pytest.raises(ValueError, match="algorithm='star': choose one of ring, naive, tree, halving, hierarchical"):
        Communicator(alone, "star")
    with pytest.raises(TypeError, match="'ring' has no option node_size"):
        Communicator(alone, "ring", node_size=2)
    with pytest.raises(ValueError, match="src=1: the ranks are 0 to 0"):
        Communicator(alone).broadcast(torch.ones(1), src=1)


def broadcasts_and_checks():
    rank, size = dist.get_rank(), dist.get_world_size()
    communicator = Communicator(check=True)
    found = []
    for src in range(size):
        tensor = torch.full((3, 2), float(rank)).t()
        communicator.broadcast(tensor, src)
        found.append(bool((tensor == src).all()))
    even = torch.ones(4)
    communicator.all_reduce(even)
    told = []
    for tensor in (torch.ones(4 + (rank == 1)), torch.ones(4, dtype=torch.float64 if rank == 2 else torch.float32)):
        try:
            communicator.all_reduce(tensor)
        except ValueError as error:
            told.append(str(error))
    return found, even.tolist(), told


def test_broadcast_and_the_check_of_lengths():
    done = run(broadcasts_and_checks, 3, quiet=True)
    for found, even, told in done.results:
        assert found == [True] * 3
        assert even == [3.0] * 4
        assert told == [
            "The ranks bring tensors of different size. Elements: rank 0: 4 of 4 bytes; rank 1: 5 of 4 bytes; "
            "rank 2: 4 of 4 bytes.",
            "The ranks bring tensors of different size. Elements: rank 0: 4 of 4 bytes; rank 1: 4 of 4 bytes; "
            "rank 2: 4 of 8 bytes.",
        ]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)).double()


def trained_with_hooks(names):
    """The gradients of four steps by DDP with each algorithm as its hook, and of one model that sees all batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(7)
    batches = torch.randn(4, size, 8, 30, generator=random, dtype=torch.float64)
    models = {"reference": net()}
    for name in names:
        models[name] = DistributedDataParallel(net(), bucket_cap_mb=0.01)  # several buckets
        models[name].register_comm_hook(None, Communicator(algorithm=name).hook)
    worst = dict.fromkeys(names, 0.0)
    for whole in batches:
        grads = {}
        for name, model in models.items():
            model.zero_grad()
            batch = whole.flatten(0, 1) if name == "reference" else whole[rank]
            model(batch).pow(2).mean().backward()
            grads[name] = [p.grad.clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        for name in names:
            for ours, right in zip(grads[name], grads["reference"], strict=True):
                worst[name] = max(worst[name], ((ours - right).norm() / right.norm()).item())
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_as_a_ddp_hook_it_averages_gradients(ranks):
    done = run(trained_with_hooks, ranks, args=(list(ALGORITHMS),), quiet=True)
    for worst in done.results:
        assert worst.keys() == ALGORITHMS.keys()
        assert all(error < 1e-10 for error in worst.values())
    assert any(m.op == "isend" for m in done.messages)
