"""Exercise 02: each wrong answer gets its own verdict, no right one is refused."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check
from course_lib.check import engine, together
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


@pytest.mark.parametrize("name", mistakes.UNNAMED)
def test_other_wrong_answers_are_told_without_a_false_theory(name):
    answer, told, *false = mistakes.UNNAMED[name]
    with pytest.raises(check.CheckFailed) as caught:
        check.messages(answer)
    assert caught.value.mistake is None and told in str(caught.value), str(caught.value)
    assert not [text for text in false if text in str(caught.value)], str(caught.value)


def test_an_endless_loop_costs_the_time_limit_once(monkeypatch):
    starts = []
    monkeypatch.setattr(engine, "collect", lambda *args: starts.append(args) or together.collect(*args))
    with pytest.raises(check.CheckFailed, match="not finished after 3 s") as caught:
        judge(replace(SPEC, seconds=3.0), mistakes.ENDLESS)
    assert len(starts) == 1
    assert "rank 0 has finished this call, rank 1 has not: it was computing" in str(caught.value)


@pytest.mark.parametrize("name", mistakes.RIGHT)
def test_right_answers_pass(name):
    verdict = judge(SPEC, mistakes.RIGHT[name], seed=len(name))  # another seed for each, and the same in each run
    assert verdict.points == 5 and "The checks passed: 5 points." in repr(verdict)


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"}


def test_not_a_function():
    with pytest.raises(check.CheckFailed, match="shift must be a function, and is a NoneType"):
        check.messages(None)
