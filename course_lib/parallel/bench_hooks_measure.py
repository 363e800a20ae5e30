"""What runs in the ranks of `course bench hooks`: training steps that differ in who averages the gradients."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives import Communicator
from course_lib.collectives.shared import SharedTransport
from course_lib.parallel import hooks
from course_lib.parallel.ddp import CheckedDDP, gradient_bytes, wrap

GLOO, ALONE = "gloo's all-reduce", "no all-reduce"
# Contender: what it is
CONTENDERS = {
    GLOO: "DDP as it is",
    "shared memory": "own_hook: one copy into shared memory, then a thread averages while backward goes on",
    "shared, waiting": "Communicator.hook: a copy in each step of the ring, and backward stands still meanwhile",
    "bf16, gloo": "torch's bf16_compress_hook: half of the bytes",
    ALONE: "inside no_sync(): what the rank computes itself, the limit of all hooks",
}


def resnet18() -> tuple[nn.Module, torch.Tensor]:
    """torchvision's, and 8 images of 32x32: much arithmetic for each gradient."""
    from torchvision.models import resnet18 as build

    return build(num_classes=10), torch.randn(8, 3, 32, 32)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Four layers of 1448x1448, a little more than 8 MB each, and 8 samples: large gradients, little arithmetic."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1448, 1448), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(8, 1448)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"resnet18": resnet18, "mlp": mlp}


@dataclass(frozen=True)
class Times:
    """What one rank, or the slowest of all, found for one model: seconds (here a step), one for each round."""

    nbytes: int  # of all gradients
    seconds: dict[str, list[float]]


@contextmanager
def steps(module: nn.Module, batch: torch.Tensor) -> Iterator[dict[str, Callable[[], None]]]:
    """One training step for each contender, with a copy of the module of its own."""
    with SharedTransport() as one, SharedTransport() as other:
        own = hooks.Own(Communicator(one))
        ways = {
            GLOO: None,
            "shared memory": (own, hooks.own_hook),
            "shared, waiting": (None, Communicator(other).hook),
            "bf16, gloo": (None, hooks.bf16_compress_hook),
            ALONE: None,
        }
        models = {}
        for name, hook in ways.items():
            models[name] = wrap(copy.deepcopy(module), batch)
            if hook:
                models[name].register_comm_hook(*hook)
        try:
            yield {name: _step(model, batch, alone=name == ALONE) for name, model in models.items()}
        finally:
            own.close()


def _step(model: CheckedDDP, batch: torch.Tensor, alone: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        with model.no_sync() if alone else nullcontext():
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(names: list[str], rounds: int, block: int) -> dict[str, Times]:
    """What this rank finds. In each round every contender takes `block` steps, in the order of the table or backwards
    by turns, so that what else happens on the machine meets them all.
    """
    found = {}
    for name in names:
        torch.manual_seed(dist.get_rank())
        module, batch = MODELS[name]()
        with steps(module, batch) as ways:
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(rounds):
                if dist.get_rank() == 0:
                    print(f"{dist.get_world_size()} ranks, {name}: round {number + 1} of {rounds}", flush=True)
                for way, step in list(ways.items())[:: -1 if number % 2 else 1]:
                    seconds[way].append(_time(step, block))
        found[name] = Times(gradient_bytes(module), seconds)
    return found


def _time(step: Callable[[], None], block: int) -> float:
    step()  # memory and caches as the following steps find them
    dist.barrier()
    began = time.perf_counter()
    for _ in range(block):
        step()
    return (time.perf_counter() - began) / block


def over_ranks(results: list[dict[str, Times]]) -> dict[str, Times]:
    """One rank's times made of those of all: the slowest rank counts."""
    return {
        name: Times(
            times.nbytes,
            {
                way: [max(found) for found in zip(*(result[name].seconds[way] for result in results), strict=True)]
                for way in times.seconds
            },
        )
        for name, times in results[0].items()
    }
