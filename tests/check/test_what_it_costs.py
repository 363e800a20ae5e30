"""Exercise 04: each wrong answer gets its own verdict, no right one is refused, and the oracle is right."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check
from course_lib.check.engine import judge
from course_lib.check.spec import Answer
from course_lib.check.specs import what_it_costs_mistakes
from course_lib.check.specs.what_it_costs import CHOOSE, SPEC, cases, choices
from course_lib.collectives import naive, ring, tree
from course_lib.collectives.simulate import simulate_all_reduce
from course_lib.collectives.topology import flat

_path = Path(__file__).parents[1] / "mistakes" / "what_it_costs.py"
_spec = importlib.util.spec_from_file_location("mistakes_what_it_costs", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_what_it_costs"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

ALGORITHMS = {"naive": naive, "tree": tree, "ring": ring}


def refused(judge_it, answer):
    with pytest.raises(check.CheckFailed) as caught:
        judge_it(answer)
    return caught.value


@pytest.mark.parametrize("name", mistakes.WRONG)
def test_wrong_answer_is_named(name):
    found = refused(check.what_it_costs, mistakes.WRONG[name])
    assert found.mistake == name, str(found)


@pytest.mark.parametrize("name", mistakes.WRONG_CHOICE)
def test_wrong_choice_is_named(name):
    found = refused(check.choose, mistakes.WRONG_CHOICE[name])
    assert found.mistake == name, str(found)


def test_other_wrong_answers_are_refused():
    for answer in mistakes.UNNAMED.values():
        refused(check.what_it_costs, answer)
    for answer in mistakes.UNNAMED_CHOICE.values():
        refused(check.choose, answer)


@pytest.mark.parametrize("name", mistakes.ALMOST_CHOICE)
def test_a_choice_by_prices_that_are_almost_right_is_refused_whatever_the_seed(name):
    """Here without processes: choose is called on the cases of many seeds."""
    for seed in range(100):
        found = choices(random.Random(seed))
        answers = [Answer(mistakes.ALMOST_CHOICE[name](*case.inputs)) for case in found]
        assert any(CHOOSE.compare(case, answer) for case, answer in zip(found, answers, strict=True)), seed


@pytest.mark.parametrize(
    ("spec", "answers"), [(SPEC, mistakes.RIGHT), (CHOOSE, mistakes.RIGHT_CHOICE)], ids=["cost", "choose"]
)
def test_right_answers_pass(spec, answers):
    for answer in answers.values():
        for seed in range(3):
            verdict = judge(spec, answer, seed)
            assert verdict.points == spec.points and f"{spec.points} points" in repr(verdict)


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub", "no_answer"}
    assert {mistake.name for mistake in CHOOSE.mistakes} == set(mistakes.WRONG_CHOICE) - {"stub"}


def test_what_is_expected_is_what_the_simulator_takes():
    """The oracle against the real algorithms on simulated ranks."""
    for case in cases(random.Random(7)):
        algorithm, nbytes, ranks, *machine = case.inputs
        if algorithm in ALGORITHMS and ranks <= 12:
            seconds = simulate_all_reduce(ALGORITHMS[algorithm].all_reduce, nbytes // 4, flat(ranks, *machine)).seconds
            assert case.expected == pytest.approx(seconds, rel=1e-12)
            again = what_it_costs_mistakes.RIGHT[algorithm](nbytes, ranks, *machine)
            assert again == pytest.approx(seconds, rel=1e-12)


def test_choices_are_no_matter_of_rounding_and_need_both_answers():
    for seed in range(50):
        found = choices(random.Random(seed))
        assert {case.expected for case in found} == {"tree", "ring"}
        for case in found:
            times = sorted(mistakes._cost(name, *case.inputs) for name in ALGORITHMS)
            assert times[1] > 1.0001 * times[0], case.story


def test_wrong_formulas_are_told_apart():
    """No two names fit the same answer in the case that is judged first."""
    by_hand = {"one_rank", "no_check", "nothing", "stub", "no_answer", "tree_bit_length"}
    for seed in range(20):
        seen = {case.inputs[0]: case for case in reversed(cases(random.Random(seed))) if case.inputs[2] > 2}
        for name in mistakes.WRONG.keys() - by_hand:
            answers = {k: Answer(mistakes.WRONG[name](*seen[k].inputs)) for k in ALGORITHMS}
            wrong = [k for k in ALGORITHMS if SPEC.compare(seen[k], answers[k])]
            assert wrong
            for k in wrong:
                assert [mistake.name for mistake in SPEC.mistakes if mistake.fits(seen[k], answers[k])] == [name]
