"""Exercise 11: each wrong answer gets its own verdict, no right one is refused, and the oracles are right."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check
from course_lib.check import engine
from course_lib.check.spec import Answer
from course_lib.check.specs import where_time_oracle
from course_lib.check.specs.where_time_goes import SPEC as GOES
from course_lib.check.specs.where_time_thief import SPEC as THIEF

_path = Path(__file__).parents[1] / "mistakes" / "where_time_goes.py"
_spec = importlib.util.spec_from_file_location("mistakes_where_time_goes", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_where_time_goes"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

SEEDS = range(3)
WRONG = [(GOES, *row) for row in mistakes.GOES_WRONG.items()]
WRONG += [(THIEF, *row) for row in [*mistakes.THIEF_WRONG.items(), *mistakes.THIEF_AGAIN]]
WRONG = [row for row in WRONG if row[1] != "stub"]
UNNAMED = [(GOES, *row) for row in mistakes.GOES_UNNAMED.values()]
UNNAMED += [(THIEF, *row) for row in mistakes.THIEF_UNNAMED.values()]
RIGHT = [(GOES, *row) for row in mistakes.GOES_RIGHT.items()] + [(THIEF, *row) for row in mistakes.THIEF_RIGHT.items()]


@pytest.fixture(scope="module")
def cases():
    """Of both exercises, for each seed: made once."""
    return {(spec.function, seed): spec.cases(random.Random(seed)) for spec in (GOES, THIEF) for seed in SEEDS}


def first_failure(spec, function, cases):
    """(name or None, text) of the first case that is not right, as the engine finds it; without processes."""
    for case in cases:
        try:
            answer = Answer(function(*case.inputs))
        except (ArithmeticError, LookupError, ValueError, AttributeError) as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            answer = Answer(error=type(error).__name__, message=str(error), kinds=kinds)
        if wrong := spec.compare(case, answer):
            failed = engine._failure(spec, case, answer, wrong)
            return failed.mistake, str(failed)
    return None


@pytest.mark.parametrize(("spec", "name", "function"), WRONG, ids=[f"{s.function}-{n}" for s, n, _ in WRONG])
def test_wrong_answer_is_named(cases, spec, name, function):
    for seed in SEEDS:
        found = first_failure(spec, function, cases[spec.function, seed])
        assert found and found[0] == name, (seed, found)


@pytest.mark.parametrize(("spec", "function", "text"), UNNAMED)
def test_other_wrong_answers_are_refused(cases, spec, function, text):
    mistake, told = first_failure(spec, function, cases[spec.function, 0])
    assert mistake is None and text in told


@pytest.mark.parametrize(("spec", "name", "function"), RIGHT, ids=[f"{s.function}-{n}" for s, n, _ in RIGHT])
def test_right_answers_pass(cases, spec, name, function):
    for seed in (0, 1):
        assert first_failure(spec, function, cases[spec.function, seed]) is None


def test_every_named_mistake_has_an_example():
    for spec, wrong in ((GOES, mistakes.GOES_WRONG), (THIEF, mistakes.THIEF_WRONG)):
        assert {mistake.name for mistake in spec.mistakes} == set(wrong) - {"stub"}


def test_what_is_expected_is_right_for_a_trace_by_hand():
    spans = [(0, "forward", 2000, 4000), (0, "backward", 4000, 8000), (0, "backward", 5000, 6000)]
    spans += [(0, "data", 0, 2000), (0, "data", 6000, 9000)]
    spans += [(0, "communication", 6000, 8000), (0, "communication", 7000, 10000)]
    assert where_time_oracle.table(spans) == {0: {"compute": 6.0, "exposed": 2.0, "data": 2.0, "idle": 0.0}}
    assert where_time_oracle.judgement(spans) is None
    # Rank 9 computes 8 ms where rank 4 computes 3: rank 4 waits 5 ms, then both communicate for 1 ms.
    pair = [(4, "backward", 0, 3000), (9, "backward", 0, 8000)]
    pair += [(4, "communication", 3000, 9000), (9, "communication", 8000, 9000)]
    found = where_time_oracle.judgement(pair)
    assert found.thief == (9, "compute")
    assert (found.waiting, found.lost, found.exposed, found.step) == ({4: 5.0, 9: 0.0}, 5.0, 1.0, 9.0)


def test_thieves_of_each_kind_are_among_the_cases(cases):
    for seed in SEEDS:
        found = [case.expected for case in cases["thief", seed]]
        assert {kind for _, kind in filter(None, found)} == {"compute", "data", "idle"} and None in found
        assert min(rank for rank, _ in [found[-2]]) > 7


def test_the_public_names_judge_the_same():
    assert "The checks passed: 6 points." in repr(check.where_time_goes(mistakes.GOES_RIGHT["as the solution"]))
    assert "The checks passed: 6 points." in repr(check.thief(mistakes.THIEF_RIGHT["as the solution"]))
    with pytest.raises(check.CheckFailed, match="still the stub"):
        check.thief(mistakes.THIEF_WRONG["stub"])
