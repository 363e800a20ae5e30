"""Stale gradients: against the recurrence in numpy, and the roots of its polynomial."""

import numpy as np
import pytest
import torch

from course_lib.parallel import server

CURVATURES = np.array([1.0, 0.3])


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quadratic(weights: torch.Tensor, step: int) -> torch.Tensor:
    return torch.from_numpy(CURVATURES) * weights


def recurrence(start: list[float], lr: float, updates: int, staleness: int, strength: float = 0.0) -> np.ndarray:
    rows = [np.array(start)]
    for t in range(updates):
        now, old = rows[-1], rows[max(0, t - staleness)]
        g = CURVATURES * old
        rows.append(now - lr * (g + strength * g**2 * (now - old)))
    return np.stack(rows)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_stale_updates_follow_the_recurrence(staleness, strength):
    start = [1.0, -2.0]
    rows = server.train(quadratic, torch.tensor(start, dtype=torch.float64), 0.4, 40, staleness, strength)
    close(rows, torch.from_numpy(recurrence(start, 0.4, 40, staleness, strength)))


def test_staleness_slows_then_diverges():
    ends = [
        server.train(quadratic, torch.ones(2, dtype=torch.float64), 0.4, 60, s)[-20:].abs().max() for s in (0, 3, 5)
    ]
    assert ends[0] < 0.01 < ends[1] < 1 < 10 < ends[2]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 7])
def test_the_largest_lr_is_where_a_root_leaves_the_unit_circle(staleness):
    """Roots of z ** (staleness + 1) - z ** staleness + lr * curvature."""
    for factor in (0.99, 1.01):
        q = factor * server.largest_lr(2.5, staleness) * 2.5
        coefficients = np.zeros(staleness + 2)
        coefficients[0] = 1
        coefficients[1] -= 1
        coefficients[-1] += q
        assert (np.abs(np.roots(coefficients)).max() < 1) == (factor < 1)


def test_compensation_is_its_formula_and_none_near_the_minimum():
    g, now, old = (random(5, seed=s) for s in (1, 2, 3))
    close(
        server.compensate(g, now, old, 0.3),
        torch.tensor([a + 0.3 * a * a * (b - c) for a, b, c in zip(g, now, old, strict=True)]),
    )
    lr = 1.05 * server.largest_lr(1.0, 1)
    for strength in (0.0, 2.0):
        small = 1e-6 * torch.ones(2, dtype=torch.float64)
        rows = server.train(quadratic, small, lr, 60, 1, strength)
        assert rows[-5:].abs().max() > 2e-6


def test_the_server_counts_staleness_and_keeps_what_each_worker_pulled():
    start, ages = torch.ones(2, dtype=torch.float64), []
    held = server.ParameterServer(start, 0.1, workers=3)
    for worker in (0, 1, 2, 0, 1, 1, 2):
        ages.append(held.push(worker, start))
        held.pull(worker)
    assert ages == [0, 1, 2, 2, 2, 0, 3]
    close(held.weights, torch.full((2,), 1 - 7 * 0.1, dtype=torch.float64))
    pulled = held.pull(0)
    pulled.zero_()  # the worker's own
    close(held.pulled[0], held.weights)
    assert torch.equal(start, torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="staleness is -1"):
        server.train(quadratic, start, 0.1, 1, -1)
    with pytest.raises(ValueError, match="not 0"):
        server.ParameterServer(start, 0.1, 0)
