"""Mistakes with data parallelism by hand: each ends in a sentence, the same on all ranks where all are concerned."""

import sys
import threading
from collections.abc import Callable

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from course_lib import run
from course_lib.collectives import Communicator
from course_lib.collectives.tcp import TcpTransport
from course_lib.parallel import BucketedDDP, NaiveDDP, OverlappedDDP

cloudpickle.register_pickle_by_value(sys.modules[__name__])
VERSIONS = (NaiveDDP, BucketedDDP, OverlappedDDP)
TINY = 1e-6  # MiB: each parameter is a bucket


class Branching(nn.Module):
    """Rank 0 takes the branch, the others do not; nobody uses `never`."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.stem, self.branch, self.head = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.branch(x) if dist.get_rank() == 0 else x)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 2)).sum().backward()


def text_of(mistake: Callable[[], object], kind: type[Exception]) -> str:
    try:
        mistake()
    except kind as error:
        return str(error)
    return "nothing was said"


def unused(version: type, communicator: Communicator | None) -> list:
    """The error of a step; and that the next step, which uses all, is right again."""
    model = version(Branching(), communicator, TINY)
    backward(model)
    said = text_of(model.synchronize, RuntimeError)
    model.zero_grad()
    for layer in (model.module.never, model.module.branch):
        layer.requires_grad_(False)
    again = version(model.module, communicator, TINY)
    model.close()
    backward(again)
    again.synchronize()
    again.close()
    return [said, again.module.head.bias.grad.tolist()]


def all_unused() -> list:
    with TcpTransport() as tcp:
        return [unused(version, over) for version in VERSIONS for over in (None, Communicator(tcp))]


def test_unused_parameters_are_named_on_all_ranks():
    results = run(all_unused, 3, quiet=True).results
    assert results[0] == results[1] == results[2]
    for said, bias_gradient in results[0]:
        assert "never.weight (0 of 3 ranks), never.bias (0 of 3 ranks)" in said
        assert "branch.weight (1 of 3 ranks), branch.bias (1 of 3 ranks)" in said
        assert 'unused="zero"' in said
        assert "stem" not in said
        assert "head" not in said
        assert bias_gradient == [3.0, 3.0]  # of the sum over three samples


def without_data() -> list[list[float]]:
    """Rank 0 has three samples, rank 1 none: it never calls the model."""
    found = []
    for version in VERSIONS:
        model = version(net(), unused="zero", bucket_mb=TINY)
        if dist.get_rank() == 0:
            backward(model)
        model.synchronize()
        found.append(model.module[1].bias.grad.tolist())
    return found


def test_a_rank_without_data_counts_as_zero():
    assert run(without_data, 2, quiet=True).results == [[[1.5, 1.5]] * 3] * 2


def changed(change: Callable[[nn.Module], object]) -> Callable[[type], str]:
    def mistake(version: type) -> str:
        model = version(net())
        change(model.module)
        return text_of(lambda: backward(model), RuntimeError)

    return mistake


def not_synchronised(version: type) -> str:
    model = version(net())
    backward(model)
    return text_of(lambda: backward(model), RuntimeError)


def synchronised_inside(version: type) -> str:
    model = version(net())
    with model.no_sync():
        backward(model)
        return text_of(model.synchronize, RuntimeError)


def other_modules(version: type) -> str:
    return text_of(lambda: version(nn.Linear(2, 2 + dist.get_rank())), ValueError)


def other_number(version: type) -> str:
    return text_of(lambda: version(nn.Linear(2, 2, bias=dist.get_rank() > 0)), ValueError)


def sparse(version: type) -> str:
    model = version(nn.Embedding(4, 2, sparse=True))
    return text_of(lambda: model(torch.tensor([1])).sum().backward(), TypeError)


def no_communicator(version: type) -> str:
    return text_of(lambda: version(net(), dist.group.WORLD), TypeError)


MISTAKES = {
    "frozen": (changed(lambda m: m[1].bias.requires_grad_(False)), "1.bias changed after the module was wrapped"),
    "dtype": (changed(lambda m: m[0].double()), "0.weight, 0.bias changed after the module was wrapped"),
    "replaced": (changed(lambda m: setattr(m, "0", nn.Linear(2, 2))), "0.weight, 0.bias changed after"),
    "not synchronised": (not_synchronised, "was not followed by model.synchronize()"),
    "inside no_sync": (synchronised_inside, "inside no_sync()"),
    "other modules": (other_modules, "number 0 of the 2 parameters and buffers, counted from 0, has not the same"),
    "other number": (other_number, "different modules: one has 1 parameters and buffers, one 2"),
    "sparse": (sparse, "The gradient of weight is sparse"),
    "no communicator": (no_communicator, "Communicator(TorchTransport(group))"),
}


def all_mistakes() -> dict[str, list[str]]:
    return {name: [mistake(version) for version in VERSIONS] for name, (mistake, _) in MISTAKES.items()}


def test_mistakes_are_named_on_all_ranks():
    results = run(all_mistakes, 2, quiet=True).results
    assert results[0] == results[1]
    for name, (_, part) in MISTAKES.items():
        for said in results[0][name]:
            assert part in said, name


class Failing(Communicator):
    """Fails in its third sum."""

    calls = 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> None:
        self.calls += op == "sum"
        if self.calls == 3:
            raise ConnectionError("the cable is loose")
        super().all_reduce(tensor, op)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "all-reduce"]


def with_a_thread() -> dict[str, object]:
    """Two backwards, then an error in the thread, how it ends, and a peer that leaves."""
    found: dict[str, object] = {}
    two = OverlappedDDP(net(), bucket_mb=TINY)
    loss = two(torch.ones(3, 2)).sum()
    loss.backward(retain_graph=True)
    found["twice"] = text_of(loss.backward, RuntimeError)
    two.synchronize()

    model = OverlappedDDP(net(), Failing(), TINY)
    backward(model)
    found["raised"] = text_of(model.synchronize, ConnectionError)
    found["again"] = text_of(lambda: (backward(model), model.synchronize()), ConnectionError)
    found["threads"] = [len(threads())]
    model.close()
    model.close()
    found["threads"].append(len(threads()))

    dropped = OverlappedDDP(net(), Communicator(), TINY)
    backward(dropped)
    dropped.synchronize()
    thread = threads()[0]
    del dropped
    thread.join(20)
    found["dropped"] = thread.is_alive()

    with TcpTransport(timeout=20) as tcp:
        model = OverlappedDDP(net(), Communicator(tcp), TINY)
        if dist.get_rank() == 1:
            return found  # leaves, and closes its connections
        backward(model)
        found["left"] = text_of(model.synchronize, RuntimeError)
        model.close()
    return found


def test_errors_of_the_thread_reach_the_caller_and_the_thread_ends():
    first, second = run(with_a_thread, 2, quiet=True).results
    for found in (first, second):
        assert "got another gradient when its all-reduce had already started" in found["twice"]
        assert found["raised"] == found["again"] == "the cable is loose"
        assert found["threads"] == [1, 0]
        assert found["dropped"] is False
    assert "rank 1" in first["left"]
