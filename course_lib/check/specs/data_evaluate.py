"""Exercise 08, second part: exact accuracy and loss over three ranks, of a wrapped model with BatchNorm and dropout."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.check.findings import told_apart
from course_lib.check.group import Evidence, GroupCase, Wrong

WORLD, FEATURES, HIDDEN, CLASSES = 3, 6, 64, 4
SHAPES = ((13, 2), (48, 8), (2, 4))  # samples, batch_size: an uneven tail; all even; a rank without samples
NUMBERS = ("accuracy", "loss")
OFFSETS = (0.0, 1.0, 3.0, 4 / 3)  # of the ranks' statistics, and their mean, which is no rank's
MEAN = 3


def network(seed: int, rank: int) -> nn.Sequential:
    """In float64; weights by the seed, BatchNorm's statistics by the rank, too, as after some steps of training.

    The rank MEAN has the mean of all ranks' statistics.
    """
    model = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, CLASSES)
    ).double()
    with torch.no_grad():
        for place, part in enumerate((*model.parameters(), model[1].running_mean)):
            generator = torch.Generator().manual_seed(seed + place)
            part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
        model[1].running_mean.add_(OFFSETS[rank])
        model[1].running_var.add_(OFFSETS[rank])
    return model


def samples_of(seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(samples, FEATURES) float64 and (samples,) int64. Half of the labels are what the model of rank 0 says."""
    generator = torch.Generator().manual_seed(seed - 1)
    images = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    with torch.no_grad():
        said = network(seed, 0).eval()(images).argmax(1)
    return images, torch.where(torch.rand(samples, generator=generator) < 0.5, said, labels)


@dataclass(frozen=True)
class Oracle:
    """By sample, from one process: was it right, and its loss."""

    right: torch.Tensor  # float64, 0 or 1
    loss: torch.Tensor  # float64

    def mean(self, chosen: Sequence[int] | slice = slice(None)) -> tuple[float, float]:
        """Accuracy and loss of these samples."""
        return self.right[chosen].mean().item(), self.loss[chosen].mean().item()


def oracle(seed: int, samples: int, rank: int = 0) -> Oracle:
    """With the buffers of this rank."""
    images, labels = samples_of(seed, samples)
    with torch.no_grad():
        scores = network(seed, rank).eval()(images)
    return Oracle((scores.argmax(1) == labels).double(), F.cross_entropy(scores, labels, reduction="none"))


def cases(rng: random.Random) -> list[GroupCase]:
    """Fresh weights and samples; redrawn until the usual wrong averages differ from the right one."""
    found = []
    for samples, batch_size in SHAPES:
        seed = rng.getrandbits(40)
        while samples == SHAPES[0][0] and not _telling(seed, samples):
            seed = rng.getrandbits(40)
        images, _ = samples_of(seed, samples)
        want = torch.tensor(oracle(seed, samples).mean(), dtype=torch.float64)
        options = {"seed": seed, "batch_size": batch_size}
        story = f"{WORLD} ranks, {samples} samples, batch_size={batch_size}"
        found.append(GroupCase("evaluation", story, (images,) * WORLD, (want,) * WORLD, options, drive=drive))
    return found


def _telling(seed: int, samples: int) -> bool:
    """The accuracies of the whole, of the ranks, of rank 0 alone and with its other buffers all differ."""
    by_sample = oracle(seed, samples)
    shares = [by_sample.mean(slice(rank, None, WORLD))[0] for rank in range(WORLD)]
    others = [oracle(seed, samples, rank).mean()[0] for rank in range(1, WORLD)]
    return len({by_sample.mean()[0], sum(shares) / WORLD, *shares, *others}) >= 5


def drive(fn: Callable, images: torch.Tensor, seed: int, batch_size: int) -> tuple[dict[str, Any], dict]:
    """Call it as a training loop would after an epoch; note each forward: which samples, in which mode."""
    rank, labels = dist.get_rank(), samples_of(seed, len(images))[1]
    torch.default_generator.manual_seed(seed % 2**30 + rank)
    module = network(seed, 0)
    model = DistributedDataParallel(module)
    module.load_state_dict(network(seed, rank).state_dict())  # ranks have seen other batches since
    forwards: list[list] = []
    wrapped: list[int] = []
    hooks = (
        module.register_forward_pre_hook(lambda _, inputs: forwards.append(_look(inputs[0], images, module))),
        module.register_forward_hook(lambda _, inputs, scores: _note_graph(scores, forwards[-1])),
        model.register_forward_pre_hook(lambda _, inputs: wrapped.append(len(inputs[0]))),
    )
    value = fn(model, images, labels, batch_size)
    for hook in hooks:
        hook.remove()
    facts = {"forwards": forwards, "wrapped": len(wrapped), **_left(module), **_numbers(value)}
    torch.set_grad_enabled(True)
    same = [torch.equal(a, b) for a, b in zip(module.parameters(), network(seed, 0).parameters(), strict=True)]
    return facts | {"weights": all(same)}, {}


def _look(batch: torch.Tensor, images: torch.Tensor, module: nn.Sequential) -> list:
    """[numbers of the samples, training mode?, was a graph recorded?, the buffers' mark]."""
    numbers = [int(n) for row in batch for n in (images == row.double()).all(1).nonzero().flatten()[:1]]
    return [numbers, module.training, False, module[1].running_var[0].item()]


def _note_graph(scores: object, look: list) -> None:
    """Gradients may be on without a graph, when nothing that went in requires one."""
    look[2] = isinstance(scores, torch.Tensor) and scores.requires_grad


def _left(module: nn.Module) -> dict[str, Any]:
    """How it stands afterwards: layers in evaluation mode, parameters without gradient, are gradients on."""
    evaluating = [name or "the model" for name, part in module.named_modules() if not part.training]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return {"evaluating": evaluating, "frozen": frozen, "gradients": torch.is_grad_enabled()}


def _numbers(value: object) -> dict[str, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        try:
            return {"value": [float(number) for number in value], "kind": ""}
        except (TypeError, ValueError, RuntimeError):
            return {"value": None, "kind": f"{type(value).__name__} of {' and '.join(type(n).__name__ for n in value)}"}
    length = f" of length {len(value)}" if isinstance(value, tuple | list) else ""
    return {"value": None, "kind": f"{type(value).__name__}{length}"}


def facts(e: Evidence, number: int) -> list[dict[str, Any]]:
    """By rank, of a case; without those that did not come back."""
    return [a.facts for a in e.answers.get(number, []) if a is not None and a.facts]


def values(e: Evidence) -> Wrong | None:
    """Two numbers on each rank, those of one process."""
    for number in e.numbers():
        case = e.cases[number]
        for rank, fact in enumerate(facts(e, number)):
            if fact["value"] is None:
                text = f"{case.story}: rank {rank} returned a value of type {fact['kind']}; needed is (accuracy, loss)."
                return Wrong("values", text, number)
            for name, got, want in zip(NUMBERS, fact["value"], case.expected[rank].tolist(), strict=True):
                if not abs(got - want) <= 1e-10 * max(abs(want), 1e-3):
                    shown = told_apart(got, want)
                    text = f"{case.story}: the {name} on rank {rank} must be {shown[1]}, and is {shown[0]}."
                    return Wrong("values", text, number)
    return None


def passes(e: Evidence) -> Wrong | None:
    """Forwards go through the bare module, without a graph, in batches that are small enough."""
    for number in e.numbers():
        story = e.cases[number].story
        for rank, fact in enumerate(facts(e, number)):
            if fact["wrapped"]:
                return Wrong("traffic", f"{story}: rank {rank} calls the wrapper, not model.module.", number)
            for numbers, _, graph, _ in fact["forwards"]:
                if len(numbers) > e.cases[number].options["batch_size"]:
                    text = f"{story}: rank {rank} gave the model {len(numbers)} samples at once."
                    return Wrong("traffic", text, number)
                if graph:
                    return Wrong("traffic", f"{story}: rank {rank} recorded a graph for backward.", number)
    return None


def work(e: Evidence) -> Wrong | None:
    """Each sample is seen by one rank, once, and no rank has much more to do than the others."""
    for number in e.numbers():
        case = e.cases[number]
        shares = [[n for numbers, *_ in fact["forwards"] for n in numbers] for fact in facts(e, number)]
        seen, samples = sorted(n for share in shares for n in share), len(case.inputs[0])
        if seen != list(range(samples)):
            text = f"all ranks together ran the model on {len(seen)} samples, {len(set(seen))} different ones"
            return Wrong("traffic", f"{case.story}: {text}.", number)
        largest = max(range(WORLD), key=lambda rank: len(shares[rank]))
        if len(shares[largest]) > -(-samples // WORLD) + case.options["batch_size"]:
            text = f"rank {largest} ran the model on {len(shares[largest])} of the {samples} samples"
            return Wrong("traffic", f"{case.story}: {text}.", number)
    return None


def untouched(e: Evidence) -> Wrong | None:
    """The model is as it was, and in training mode with all its layers; gradients are on."""
    for number in e.numbers():
        for rank, fact in enumerate(facts(e, number)):
            if what := _changed(fact):
                return Wrong("input", f"{e.cases[number].story}: {what} (rank {rank}).", number)
    return None


def _changed(fact: dict[str, Any]) -> str | None:
    if not fact["weights"]:
        return "the weights have changed"
    if "the model" in fact["evaluating"]:
        return "the model is in evaluation mode afterwards"
    if fact["evaluating"]:
        return f"the model's layers {', '.join(fact['evaluating'])} are in evaluation mode afterwards"
    if fact["frozen"]:
        return f"{fact['frozen'][0]} does not require a gradient afterwards"
    return None if fact["gradients"] else "torch.is_grad_enabled() is False afterwards"
