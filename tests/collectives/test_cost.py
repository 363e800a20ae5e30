"""The closed formulas, against the simulator that runs the real collectives."""

import math

import pytest

from course_lib.collectives import cost, halving, hierarchical, naive, ring, tree
from course_lib.collectives.simulate import simulate_all_reduce
from course_lib.collectives.topology import Link, cluster, flat

ALGORITHMS = {"naive": naive, "tree": tree, "ring": ring, "halving": halving}
ALPHA, BETA, GAMMA = 3e-5, 1.1e-9, 2e-10
NEAR, FAR = Link(1e-5, 1e-10), Link(5e-5, 4e-9)


def simulated(name, numel, ranks):
    return simulate_all_reduce(ALGORITHMS[name].all_reduce, numel, flat(ranks, ALPHA, BETA, GAMMA)).seconds


@pytest.mark.parametrize("name", ALGORITHMS)
def test_formula_equals_simulation(name):
    for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 12):
        for numel in (0, ranks * 8, ranks * 8 * 999):  # can be cut evenly by each of the algorithms
            predicted = cost.predict(name, 4 * numel, ranks, ALPHA, BETA, GAMMA)
            assert simulated(name, numel, ranks) == pytest.approx(predicted, rel=1e-12), (ranks, numel)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_uneven_lengths_lie_between_two_even_ones(name):
    for ranks in (2, 3, 5, 6, 8):
        cut = halving.power_of_two(ranks) if name == "halving" else ranks
        for numel in (1, ranks + 1, 16 * ranks - 1):
            low, high = (
                cost.predict(name, 4 * length, ranks, ALPHA, BETA, GAMMA) for length in (numel, -(-numel // cut) * cut)
            )
            found = simulated(name, numel, ranks)
            assert low * (1 - 1e-12) <= found <= high * (1 + 1e-12) or numel < cut, (ranks, numel)
            if name == "ring":  # its longest chunk is on its way in every step
                assert found == pytest.approx(high, rel=1e-12)


@pytest.mark.parametrize("name", [*ALGORITHMS, "hierarchical"])
def test_two_levels(name):
    for nodes, per_node in ((1, 4), (2, 2), (2, 4), (3, 2), (4, 1), (5, 2), (4, 4)):
        numel = nodes * per_node * 960
        for shared in (False, True):
            where = cluster(nodes, per_node, NEAR, FAR, GAMMA, shared)
            algorithm, extra = (
                ALGORITHMS.get(name, hierarchical),
                {"node_size": per_node} if name not in ALGORITHMS else {},
            )
            found = simulate_all_reduce(algorithm.all_reduce, numel, where, **extra).seconds
            options = {"node_size": per_node, "inside": NEAR, "shared_uplink": shared}
            arguments = (name, 4 * numel, nodes * per_node, FAR.alpha, FAR.beta)
            predicted = cost.predict(*arguments, GAMMA, **options)
            crowded = shared and nodes > 1 and per_node > 1 and name in ("hierarchical", "halving")
            if crowded:  # the queues overlap: the formula is a bound, and its docstring says how good
                slack = cost.terms(name, nodes * per_node, per_node).messages * FAR.alpha
                slack += cost.terms(name, nodes * per_node, per_node).sums * 4 * numel * GAMMA
                assert predicted - slack <= found < predicted, (nodes, per_node)
            else:
                assert found == pytest.approx(predicted, rel=1e-12), (nodes, per_node, shared)


def test_hierarchical_on_nodes_of_any_size():
    found = simulate_all_reduce(hierarchical.all_reduce, 6000, cluster(2, 3, NEAR, FAR, GAMMA, False), node_size=3)
    predicted = cost.predict("hierarchical", 24_000, 6, FAR.alpha, FAR.beta, GAMMA, node_size=3, inside=NEAR)
    assert found.seconds == pytest.approx(predicted, rel=1e-12)


def test_known_values():
    """Worked out on paper: 4 ranks, 1 MB, 50 us, 1 GB/s, sums at 10 GB/s."""
    values = {"naive": 6.6e-3, "tree": 4.4e-3, "ring": 1.875e-3, "halving": 1.775e-3}
    for name, seconds in values.items():
        assert cost.predict(name, 1_000_000, 4, 50e-6, 1e-9, 1e-10) == pytest.approx(seconds, rel=1e-12)
    assert cost.predict("ring", 1_000_000, 1, 50e-6, 1e-9) == 0


def test_crossover_is_where_both_cost_the_same():
    for ranks in (4, 5, 8):
        where = cost.crossover("tree", "ring", ranks, ALPHA, BETA, GAMMA)
        tree_, ring_ = (cost.predict(name, where, ranks, ALPHA, BETA, GAMMA) for name in ("tree", "ring"))
        assert tree_ == pytest.approx(ring_)
        pair = ("tree", "ring")
        assert cost.fastest(where / 2, ranks, ALPHA, BETA, GAMMA, pair) == "tree"
        assert cost.fastest(where * 2, ranks, ALPHA, BETA, GAMMA, pair) == "ring"
    assert cost.crossover("naive", "tree", 8, ALPHA, BETA, GAMMA) is None  # a tree is better at every size
    assert cost.crossover("ring", "ring", 8, ALPHA, BETA) is None


def test_bytes_of_a_ring_hardly_depend_on_the_ranks_but_its_messages_do():
    volumes = [cost.terms("ring", ranks).volume for ranks in (2, 8, 64, 1024)]
    assert volumes == sorted(volumes) and volumes[0] == 1 and volumes[-1] < 2
    assert cost.terms("ring", 1024).messages == 2046
    assert cost.terms("tree", 1024).messages == 2 * math.log2(1024)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("star", 1, 2, 1, 1), "no algorithm 'star': choose one of naive, tree, halving, ring, hierarchical"),
        (("ring", 1, 0, 1, 1), "ranks must be a whole number, 1 or more, not 0"),
        (("ring", 1, 2.0, 1, 1), "ranks must be"),
        (("ring", -1, 2, 1, 1), "nbytes must be 0 or more"),
    ],
)
def test_bad_arguments_are_sentences(arguments, text):
    with pytest.raises(ValueError, match=text):
        cost.predict(*arguments)


def test_nodes_that_cannot_be():
    with pytest.raises(ValueError, match="node_size=3 does not divide 4 ranks"):
        cost.predict("hierarchical", 1, 4, 1, 1, node_size=3)
    with pytest.raises(ValueError, match="no closed formula for 'tree' with node_size=3"):
        cost.predict("tree", 1, 6, 1, 1, node_size=3)
