"""What the algorithms are made of: chunks, operands, parts of a group, trees; and that bad input is told clearly."""

import doctest
import importlib
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import run
from course_lib.collectives import Sub, TorchTransport, naive, ring, tree
from course_lib.collectives.chunks import length, split
from course_lib.collectives.communicator import ALGORITHMS
from course_lib.collectives.operand import opened
from course_lib.launch import RunError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("name", ["chunks", "tree", "halving"])
def test_doctests(name):
    found = doctest.testmod(importlib.import_module(f"course_lib.collectives.{name}"))
    assert found.attempted
    assert not found.failed


def test_chunks_cover_all_and_differ_by_one():
    for numel in range(23):
        for parts in range(1, 9):
            chunks = split(torch.arange(numel), parts)
            assert torch.cat(chunks).tolist() == list(range(numel))
            lengths = [len(chunk) for chunk in chunks]
            assert lengths == sorted(lengths, reverse=True) == [length(numel, parts, k) for k in range(parts)]
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize(
    ("tensor", "op", "error", "words"),
    [
        (torch.ones(3), "average", ValueError, "op='average': choose 'sum', 'mean' or 'max'"),
        (torch.ones(3, dtype=torch.int64), "mean", TypeError, "mean of torch.int64 tensors need not be a whole"),
        ([1.0, 2.0], "sum", TypeError, "not on a list"),
        (torch.ones(3, dtype=torch.complex64), "sum", TypeError, "not torch.complex64"),
        (torch.ones(3).to_sparse(), "sum", TypeError, "dense tensors"),
        (torch.ones(1).expand(3), "sum", ValueError, "the same memory"),
    ],
)
def test_bad_arguments(alone, algorithm, tensor, op, error, words):
    with pytest.raises(error, match=words):
        algorithm.all_reduce(tensor, op, alone)


def test_a_failed_collective_leaves_a_strided_tensor_as_it_was():
    tensor = torch.arange(6.0).view(2, 3).t()
    with pytest.raises(TimeoutError), opened(tensor, "sum", 2) as operand:
        operand.flat.add_(1)
        raise TimeoutError
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("node_size", [0, 3, -2, 8])
def test_nodes_must_be_equally_large(node_size):
    class Four:
        rank, size = 1, 4

    with pytest.raises(ValueError, match=f"node_size={node_size} does not divide 4 ranks"):
        ALGORITHMS["hierarchical"].all_reduce(torch.ones(3), transport=Four(), node_size=node_size)


def test_sub_refuses_wrong_lists():
    class Four:
        rank, size = 1, 4

    with pytest.raises(ValueError, match="Rank 1 is not among"):
        Sub(Four(), [0, 2])
    with pytest.raises(ValueError, match="at most once"):
        Sub(Four(), [1, 1])
    with pytest.raises(ValueError, match="ranks 0 to 3"):
        Sub(Four(), [1, 4])


def test_every_tree_reaches_every_rank_in_few_steps():
    for size in range(1, 40):
        for rank in range(1, size):
            assert rank in tree.children(tree.parent(rank), size)
        assert sum(len(tree.children(rank, size)) for rank in range(size)) == size - 1
        deepest = max(rank.bit_count() for rank in range(size))  # each step up clears one bit
        assert deepest <= (size - 1).bit_length()


def in_any_order(size):
    """Rings over parts of the world, in orders that no process group offers."""
    t, results = TorchTransport(), []
    for ranks in ([size - 1, *range(size - 1)], list(range(size))[::-2], [t.rank]):
        if t.rank in ranks:
            part = Sub(t, ranks)
            tensor = torch.arange(5.0) + 10 * t.rank
            ring.all_reduce(tensor, "sum", part)
            expected = torch.arange(5.0) * len(ranks) + 10 * sum(ranks)
            results.append((part.rank == ranks.index(t.rank), torch.equal(tensor, expected)))
    return results


def test_sub_takes_ranks_in_any_order():
    done = run(in_any_order, 4, args=(4,), quiet=True)
    assert [len(found) for found in done.results] == [2, 3, 2, 3]
    assert all(all(pair) for found in done.results for pair in found)


def scattered_and_gathered(numel):
    """For several ops: (chunk, whole again, input left as it was), and torch's own reduce of the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    answers = []
    for op in ("sum", "mean", "max"):
        tensor = torch.arange(float(numel)) * (rank + 1)
        before, output = tensor.clone(), torch.empty(length(numel, size, rank))
        dist.barrier()
        ring.reduce_scatter_tensor(output, tensor, op)
        whole = torch.empty(numel, 2)[:, 0]  # not contiguous
        dist.barrier()
        ring.all_gather_into_tensor(whole, output)
        answers.append((output, whole.clone(), torch.equal(tensor, before)))
    return answers


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_reduce_scatter_and_all_gather(ranks, sent_by):
    numel = 11
    done = run(scattered_and_gathered, ranks, args=(numel,), quiet=True)
    total = sum(range(1, ranks + 1))
    lengths = [length(numel, ranks, k) for k in range(ranks)]
    for k, answers in enumerate(done.results):
        for (chunk, whole, kept), factor in zip(answers, (total, total / ranks, ranks), strict=True):
            expected = torch.arange(float(numel)) * factor
            assert kept
            assert torch.equal(whole, expected)
            assert torch.equal(chunk, expected.tensor_split(ranks)[k])
        scattered = 4 * (numel - lengths[k])
        gathered = 4 * (numel - lengths[(k + 1) % ranks]) if ranks > 1 else 0
        assert sent_by(done, k) == [scattered, gathered] * 3


def test_a_part_of_the_wrong_size(alone):
    with pytest.raises(ValueError, match=r"chunk 0, which has 3 elements of torch\.float32; .* has 2"):
        ring.reduce_scatter_tensor(torch.ones(2), torch.ones(3), "sum", alone)
    with pytest.raises(ValueError, match=r"3 of torch\.float64"):
        ring.all_gather_into_tensor(torch.ones(3), torch.ones(3, dtype=torch.float64), alone)


def test_a_rank_outside_of_the_group_is_told():
    def outside():
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            TorchTransport(group)

    with pytest.raises(RunError, match="Rank 1 is not in this group"):
        run(outside, 2, quiet=True)


@pytest.mark.parametrize("algorithm", [ring, naive])
def test_different_lengths_end_the_run(algorithm):
    def uneven():
        algorithm.all_reduce(torch.ones(10 + (dist.get_rank() == 1)))

    with pytest.raises(RunError):  # rather than wrong sums on some ranks
        run(uneven, 3, quiet=True, timeout=30)


@pytest.mark.parametrize("transport", ["tcp", TorchTransport])
def test_what_is_no_transport_is_a_sentence(transport):
    with pytest.raises(TypeError, match=r"give None for torch.distributed, or an object such as TcpTransport\(\)"):
        ring.all_reduce(torch.ones(3), transport=transport)
