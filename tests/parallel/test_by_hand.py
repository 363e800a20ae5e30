"""Data parallelism by hand, on one rank in this process: buckets, arguments, views."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib.parallel import BucketedDDP, NaiveDDP, OverlappedDDP
from course_lib.parallel.bucketed import fill_buckets

VERSIONS = [NaiveDDP, BucketedDDP, OverlappedDDP]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameter(numel: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(numel, dtype=dtype))


@pytest.mark.parametrize(
    ("lengths", "capacity", "buckets"),
    [
        ([1, 1, 1], 8, [[2, 1], [0]]),
        ([1, 1, 1], 7, [[2], [1], [0]]),
        ([1, 1, 1], 12, [[2, 1, 0]]),
        ([1, 9, 1], 12, [[2], [1], [0]]),
        ([9, 1, 1], 12, [[2, 1], [0]]),
    ],
)
def test_buckets_by_hand(lengths, capacity, buckets):
    assert fill_buckets([parameter(n) for n in lengths], capacity) == buckets


def test_buckets_of_two_dtypes_are_filled_side_by_side():
    """In the order in which they get full: that of the last parameter of each."""
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float64]
    parameters = [parameter(1, kind) for kind in kinds]
    assert fill_buckets(parameters, 16) == [[4, 3], [1], [2, 0]]


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(DTYPES)), min_size=1, max_size=30), st.integers(0, 500))
def test_every_parameter_has_one_bucket(kinds, capacity):
    parameters = [parameter(*kind) for kind in kinds]
    buckets = fill_buckets(parameters, capacity)
    assert sorted(n for bucket in buckets for n in bucket) == list(range(len(parameters)))
    assert [bucket[-1] for bucket in buckets] == sorted((bucket[-1] for bucket in buckets), reverse=True)
    for bucket in buckets:
        members = [parameters[n] for n in bucket]
        assert len({p.dtype for p in members}) == 1
        assert bucket == sorted(bucket, reverse=True)
        assert len(bucket) == 1 or sum(p.numel() * p.element_size() for p in members) <= capacity


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("version", VERSIONS)
def test_alone_it_is_the_module_itself(version):
    """Channels last, a buffer of bool, an empty parameter, clipping: whatever a module may hold."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 2)).double()
    module = module.to(memory_format=torch.channels_last)
    module.register_buffer("mask", torch.tensor([True, False]))
    module.register_buffer("levels", torch.tensor([-3, 250], dtype=torch.int16))
    module.nothing = nn.Parameter(torch.zeros(0))
    x = torch.randn(5, 3, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    model = version(module, bucket_mb=0.001)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters() if p.numel()]
    model.synchronize()
    found = [p.grad for p in model.parameters() if p.numel()]
    assert len(found) == len(expected) == 6
    assert all(map(torch.equal, found, expected))
    assert module.mask.tolist() == [True, False]
    assert module.levels.tolist() == [-3, 250]
    with torch.inference_mode():
        assert model(x).shape == (5, 2)
    model.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("version", [BucketedDDP, OverlappedDDP])
def test_gradients_are_views_of_the_bucket(version):
    """With zeros instead of None backward adds to them where they are."""
    model = version(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    (bucket,) = model.buckets
    places = set()
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        model.synchronize()
        places |= {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        model.zero_grad(set_to_none=False)
        assert not bucket.buffer.any()
    assert places == {bucket.buffer.untyped_storage().data_ptr()}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("version", VERSIONS)
def test_closed_or_dropped_it_leaves_the_module_alone(version):
    module = nn.Linear(2, 2)
    model = version(module)
    model.close()
    module(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2))  # a hook would have noticed a backward without synchronize
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    again = weakref.ref(version(module))
    gc.collect()
    assert again() is None
    module(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"bucket_mb": 0}, ValueError, "more than 0 MiB"),
        ({"bucket_mb": float("nan")}, ValueError, "more than 0 MiB"),
        ({"bucket_mb": "25"}, TypeError, "as a number of MiB"),
        ({"unused": "ignore"}, ValueError, 'choose "error" or "zero"'),
        ({"module": nn.ReLU()}, ValueError, "nothing to average"),
        ({"module": nn.LazyLinear(2)}, ValueError, "weight, bias has no shape yet"),
        ({"module": "resnet18"}, TypeError, "module is a str"),
    ],
)
def test_bad_arguments(arguments, error, part):
    for version in VERSIONS:
        with pytest.raises(error, match=part):
            version(**{"module": nn.Linear(2, 2), **arguments})


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        NaiveDDP(nn.Linear(2, 2))


@pytest.mark.usefixtures("alone")
def test_a_huge_capacity_is_one_bucket():
    assert len(BucketedDDP(nn.Linear(2, 2), bucket_mb=float("inf")).buckets) == 1
