"""Exercise 02: each wrong answer gets its own verdict, no right one is refused."""

import importlib.util
import sys
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check
from course_lib.check.engine import judge
from course_lib.check.specs.messages import SPEC

_path = Path(__file__).parents[1] / "mistakes" / "messages.py"
_spec = importlib.util.spec_from_file_location("mistakes_messages", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_messages"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

pytestmark = pytest.mark.slow
WRONG = [*mistakes.WRONG.items(), *mistakes.AGAIN]


@pytest.mark.parametrize(("name", "answer"), WRONG, ids=[f"{k}-{name}" for k, (name, _) in enumerate(WRONG)])
def test_wrong_answer_is_named(name, answer):
    with pytest.raises(check.CheckFailed) as caught:
        check.messages(answer)
    assert caught.value.mistake == name, str(caught.value)


def test_other_wrong_answers_are_refused():
    for answer in mistakes.UNNAMED.values():
        with pytest.raises(check.CheckFailed):
            check.messages(answer)


@pytest.mark.parametrize("name", mistakes.RIGHT)
def test_right_answers_pass(name):
    for seed in range(2):
        verdict = judge(SPEC, mistakes.RIGHT[name], seed)
        assert verdict.points == 5 and "The checks passed: 5 points." in repr(verdict)


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"}


def test_not_a_function():
    with pytest.raises(check.CheckFailed, match="shift must be a function, and is a NoneType"):
        check.messages(None)
