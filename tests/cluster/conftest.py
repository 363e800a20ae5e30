"""What the checks would have seen on other machines."""

import pytest


@pytest.fixture
def found():
    """A probe's answer on a healthy machine without a GPU, with the versions that are installed here."""
    from importlib import metadata

    return {
        "torch": metadata.version("torch"),
        "torchvision": metadata.version("torchvision"),
        "backends": {"gloo": True, "nccl": True, "mpi": False},
        "rank_bytes": 400_000_000,
        "built_for": "13.0",
        "gpus": [],
    }
