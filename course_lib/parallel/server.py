"""A parameter server and its stale gradients, in one process and without chance.

While a worker computes, other workers' updates arrive. Its gradient is then added to weights that are no longer those
it was computed at: asynchronous SGD (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1).
Delay compensation corrects it to first order, with g ⊙ g in place of the Hessian's diagonal (Zheng et al.,
"Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017: the update rule of DC-ASGD).
"""

import math
from collections.abc import Callable

import torch


class ParameterServer:
    """Holds the weights, [n], and what each worker pulled last.

    compensation   the paper's λ; 0 is plain asynchronous SGD
    """

    def __init__(self, weights: torch.Tensor, lr: float, workers: int, compensation: float = 0.0) -> None:
        if workers < 1:
            raise ValueError(f"A parameter server needs at least 1 worker, not {workers}.")
        self.weights, self.lr, self.compensation = weights.clone(), lr, compensation
        self.pulled = [weights.clone() for _ in range(workers)]  # all begin together
        self.updates, self._pulled_at = 0, [0] * workers

    def pull(self, worker: int) -> torch.Tensor:
        """The weights as they are now, [n]; the server remembers them as this worker's."""
        self.pulled[worker], self._pulled_at[worker] = self.weights.clone(), self.updates
        return self.pulled[worker].clone()

    def push(self, worker: int, gradient: torch.Tensor) -> int:
        """Update with a gradient, [n], computed at what this worker pulled; returns how many updates old that was."""
        staleness = self.updates - self._pulled_at[worker]
        if self.compensation:
            gradient = compensate(gradient, self.weights, self.pulled[worker], self.compensation)
        self.weights = self.weights - self.lr * gradient
        self.updates += 1
        return staleness


def compensate(gradient: torch.Tensor, now: torch.Tensor, old: torch.Tensor, strength: float) -> torch.Tensor:
    """g + λ g ⊙ g ⊙ (now - old): about what the gradient is at the weights `now`, when g was computed at `old`."""
    return gradient + strength * gradient * gradient * (now - old)


def train(
    gradient: Callable[[torch.Tensor, int], torch.Tensor],
    weights: torch.Tensor,
    lr: float,
    updates: int,
    staleness: int = 0,
    compensation: float = 0.0,
) -> torch.Tensor:
    """All weights on the way, [updates + 1, n], the first row being `weights`, [n].

    staleness + 1 workers push in turn. So each gradient is computed at weights `staleness` updates old, except in the
    first turn, where all have the weights of the beginning. 0 is plain SGD.

    gradient   of the weights, [n], in update t (0, 1, ...), so that each update can have samples of its own
    """
    if staleness < 0:
        raise ValueError(f"Gradients cannot come from the future: staleness is {staleness}.")
    workers = staleness + 1
    server, rows = ParameterServer(weights, lr, workers, compensation), [weights.clone()]
    for t in range(updates):
        worker = t % workers
        server.push(worker, gradient(server.pulled[worker].clone(), t))
        server.pull(worker)
        rows.append(server.weights)
    return torch.stack(rows)


def largest_lr(curvature: float, staleness: int) -> float:
    """With less, `train` converges on the loss curvature / 2 * w ** 2; with more it diverges.

    The weights follow w[t+1] = w[t] - lr * curvature * w[t - staleness], which goes to 0 exactly when 0 < lr *
    curvature < 2 cos(staleness π / (2 staleness + 1)) (Levin and May, "A note on difference-delay equations",
    Theoretical Population Biology 9(2), 1976). That is 2 without staleness, 1 with staleness 1, then about π / (2
    staleness + 1). Compensation does not change it: near the minimum g ⊙ g is smaller than any multiple of g.
    """
    return 2 * math.cos(staleness * math.pi / (2 * staleness + 1)) / curvature
