"""Exact evaluation by real ranks, 1 to 4 of them, against one process in float64. (Shares alone: test_data.py.)"""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run
from course_lib.train.data import test_keys as keys_of_test
from course_lib.train.evaluate import evaluate

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

CPU, SIZES, BATCH = torch.device("cpu"), (4, 3, 2, 1), 2


def net(rank: int) -> nn.Module:
    """Equal weights; BatchNorm's statistics as they are when each rank has seen other batches."""
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        module[1].running_mean.add_(0.7 * rank)
        module[1].num_batches_tracked.add_(rank)
    return module


def test_set(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (samples,), generator=generator)


test_set.__test__ = False  # no test, in spite of its name


def on_every_size(folder):
    """In a rank: {(ranks, samples): (result, still training, statistics of rank 0)}. The last rank leaves each time."""
    found, rank = {}, dist.get_rank()
    for size in SIZES:
        if size < SIZES[0]:
            dist.destroy_process_group()
            if rank >= size:
                break
            store = dist.FileStore(f"{folder}/{size}", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        for samples in range(1, 14):
            images, labels = test_set(samples)
            module = net(rank)
            batches = (
                (images[numbers], labels[numbers])
                for numbers in ([index for _, index in keys] for keys in keys_of_test(samples, BATCH, rank, size))
            )
            result = evaluate(module, batches, CPU)
            found[size, samples] = result, module.training, module[1].running_mean.tolist()
        model = DistributedDataParallel(net(rank))
        evaluate(model.module, [], CPU) if size > 1 and rank else evaluate(model.module, [test_set(3)], CPU)
        model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()  # and training goes on
        found[size, "gradient"] = model.module[0].weight.grad.tolist()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(on_every_size, SIZES[0], args=(str(tmp_path_factory.mktemp("stores")),), quiet=True).results


@pytest.mark.parametrize("samples", range(1, 14))
def test_every_rank_has_the_result_of_one_process(found, samples):
    images, labels = test_set(samples)
    module = net(0).eval()
    with torch.no_grad():
        scores = module(images)
    right = sum(row.tolist().index(row.max().item()) == label for row, label in zip(scores, labels, strict=True))
    each = [(row.exp().sum().log() - row[label]).item() for row, label in zip(scores, labels, strict=True)]
    for size in SIZES:
        for rank in range(size):
            result, training, mean = found[rank][size, samples]
            assert (result["right"], result["samples"]) == (right, samples)
            assert result["accuracy"] == right / samples
            assert result["eval_loss"] == pytest.approx(sum(each) / samples, rel=1e-12)
            assert training
            assert mean == net(0)[1].running_mean.tolist()


def test_ranks_have_the_same_bits(found):
    for size in SIZES:
        for samples in range(1, 14):
            assert len({str(found[rank][size, samples]) for rank in range(size)}) == 1


def test_training_goes_on_after_an_evaluation_in_which_only_rank_0_had_samples(found):
    for size in SIZES:
        gradients = [found[rank][size, "gradient"] for rank in range(size)]
        assert all(gradient == gradients[0] for gradient in gradients)
