"""Exercise 07, in the rank: what autograd keeps from forward to backward, and for how many samples at a time."""

from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A tensor that autograd has saved. It goes when backward has used it, or with its graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass
class _Forward:
    samples: int
    kept: WeakSet = field(default_factory=WeakSet)
    backwards: int = 0

    def save(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor.detach())  # else a saved result would hold its own graph
        self.kept.add(kept)
        return kept


class Graphs:
    """Follows the forwards of `module` that record a graph, whoever calls it: DDP, or the learner by `.module`.

    passes     for each: [samples in it, samples whose graph was still held then and had no backward, ... and had one]
    backwards  [how many came to what `module` returned, to how many of them with a gradient that is not 0 everywhere]
    """

    def __init__(self, module: nn.Module) -> None:
        self.begin()
        self._forwards: list[_Forward] = []
        self._inside: list[saved_tensors_hooks] = []
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def begin(self) -> None:
        """Count anew from here."""
        self.passes: list[list[int]] = []
        self.backwards = [0, 0]

    def _begin(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        now = _Forward(len(inputs[0]))
        if torch.is_grad_enabled():
            held = [f for f in self._forwards if f.kept]
            unused = sum(f.samples for f in held if not f.backwards)
            self.passes.append([now.samples, unused, sum(f.samples for f in held) - unused])
            self._forwards = [*held, now]
        self._inside.append(saved_tensors_hooks(now.save, lambda kept: kept.tensor))
        self._inside[-1].__enter__()

    def _end(self, _: nn.Module, inputs: tuple[torch.Tensor], scores: torch.Tensor | None) -> None:
        self._inside.pop().__exit__()
        if isinstance(scores, torch.Tensor) and scores.requires_grad:
            now = self._forwards[-1]

            def used(gradient: torch.Tensor) -> None:
                now.backwards += 1
                self.backwards[0] += 1
                self.backwards[1] += bool(gradient.any())

            scores.register_hook(used)
