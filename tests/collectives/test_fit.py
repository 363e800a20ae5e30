"""The fit finds the numbers that made the data, and what measure brings home is what it says. No times are asserted."""

import doctest

import numpy as np
import pytest

from course_lib import run
from course_lib.collectives import cost, fit
from course_lib.collectives.fit import Costs, Fit
from course_lib.collectives.measure import Samples, measure

SIZES = (1000, 10_000, 100_000, 1_000_000)
TRUE = {"pair": (20e-6, 1e-9), "pairs": (30e-6, 2e-9), "around": (50e-6, 4e-9)}
GAMMA = {"add": 1e-10, "adds": 3e-10}


def made(noise=0.0, ranks=4):
    """Samples of `ranks` ranks whose slowest one follows the model; rank 0 is always quicker."""
    generator, everyone = np.random.default_rng(5), []
    for rank in range(ranks):
        one = Samples(rank, ranks, 2)
        for n in SIZES:
            for name, (alpha, beta) in TRUE.items():
                one.seconds[name, n] = [alpha + n * beta] * 3
            for name, gamma in GAMMA.items():
                one.seconds[name, n] = [2e-6 + n * gamma] * 3
        one.seconds["ring", 4_000_000] = [1.0, 9.0, 0.03]
        factor = 0.5 if rank == 0 else 1.0
        one.seconds = {
            k: [factor * t * (1 + noise * generator.uniform(-1, 1)) for t in v] for k, v in one.seconds.items()
        }
        everyone.append(one)
    return everyone


def test_the_numbers_that_made_the_data_come_back():
    found = fit.fit(made())
    for name, (alpha, beta) in TRUE.items():
        costs = getattr(found, name)
        assert (costs.alpha, costs.beta) == pytest.approx((alpha, beta))
        assert costs.gamma == pytest.approx(GAMMA["add" if name == "pair" else "adds"])
        assert costs.worst < 1e-9 and [n for n, _, _ in costs.points] == list(SIZES)
    assert found.measured == {("ring", 4_000_000): 1.0}  # the median of the slowest rank
    assert found.warning == "" and "Warning" not in repr(found)
    (row,) = found.compare()
    predicted = cost.predict("ring", 4_000_000, 4, *TRUE["around"], GAMMA["adds"])
    assert row == ("ring", 4_000_000, pytest.approx(predicted), 1.0, pytest.approx(predicted - 1))


def test_a_poor_fit_is_said():
    samples = made()
    for one in samples:
        one.seconds["around", 10_000] = [1.0]
    assert fit.fit(samples).warning.startswith("Warning: points are more than 25% off the line (around).")
    assert "Warning" in repr(fit.fit(samples))


def test_least_squares_is_that_of_numpy():
    rng = np.random.default_rng(1)
    x = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    y = (3e-5 + 2e-9 * x) * rng.uniform(0.7, 1.3, 5)
    (intercept, slope), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(5))
    a, b, points = fit.line(dict(zip(x.tolist(), y.tolist(), strict=True)))
    assert (a, b) == pytest.approx((intercept, slope), rel=1e-9)
    assert [r for _, _, r in points] == pytest.approx(((intercept + slope * x) / y - 1).tolist(), abs=1e-9)


@pytest.mark.parametrize(("points", "zero"), [({1: 1.0, 10: 30.0, 100: 400.0}, 0), ({1: 5.0, 10: 4.0, 100: 3.0}, 1)])
def test_no_cost_is_negative(points, zero):
    found = fit.line(points)[:2]
    assert found[zero] == 0 and found[1 - zero] > 0


def test_ranks_that_share_nothing_cost_what_the_formulas_say():
    for ranks in (2, 3, 4, 7, 8):
        one = Costs(30e-6, 1e-9, 2e-10, ())
        machine = Fit(ranks, ranks, one, one, one, {})
        for name in cost.ALGORITHMS:
            right = cost.predict(name, 1 << 20, ranks, 30e-6, 1e-9, 2e-10)
            assert machine.predict(name, 1 << 20) == pytest.approx(right)


def test_a_tree_has_fewer_pairs_at_once_from_level_to_level():
    pair, pairs = Costs(1.0, 0, 0, ()), Costs(4.0, 0, 0, ())
    assert Fit(2, 2, pair, pairs, pairs, {}).predict("tree", 8) == pytest.approx(2 * 1)
    assert Fit(4, 2, pair, pairs, pairs, {}).predict("tree", 8) == pytest.approx(2 * (4 + 1))
    assert Fit(8, 2, pair, pairs, pairs, {}).predict("tree", 8) == pytest.approx(2 * (4 + 2 + 1))


def test_what_is_measured_is_what_is_said():
    """One real run: every key is there, and each rank sent what the names promise."""
    sizes, totals, rounds = (64, 4096), (8192,), 2
    result = run(measure, 3, args=(sizes, totals, rounds))
    names = ("pair", "pairs", "around", "add", "adds")
    keys = {(name, n) for name in names for n in sizes} | {(name, 8192) for name in ("naive", "tree", "ring")}
    for rank, one in enumerate(result.results):
        assert (one.rank, one.ranks) == (rank, 3)
        assert one.seconds.keys() == keys
        assert all(len(times) == rounds and min(times) > 0 for times in one.seconds.values())
    sent = [m for m in result.messages if m.op in ("send", "isend")]
    around = [m for m in sent if m.op == "isend" and m.nbytes == 4096]
    assert around and {(m.rank, m.peer) for m in around} == {(0, 1), (1, 2), (2, 0)}
    assert {(m.rank, m.peer) for m in sent if m.op == "send" and m.nbytes == 64} == {(0, 1), (1, 0)}
    assert fit.fit(result.results).compare()


def test_a_busy_machine_gives_fewer_rounds():
    results = run(measure, 2, args=((64, 4096), (), 50, (), 0.0)).results
    assert {len(times) for one in results for times in one.seconds.values()} == {1}


def test_bad_input_is_a_sentence():
    with pytest.raises(TypeError, match="fit wants what measure returned on each rank"):
        fit.fit([1, 2])
    with pytest.raises(ValueError, match="two sizes or more"):
        fit.line({4: 1.0})
    found = doctest.testmod(fit)
    assert found.attempted and not found.failed
