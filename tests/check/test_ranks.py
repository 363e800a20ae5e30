"""Exercise 01: each wrong answer gets its own verdict, no right one is refused."""

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check, run
from course_lib.check.engine import judge
from course_lib.check.specs.ranks import SPEC, environment, right

_spec = importlib.util.spec_from_file_location("mistakes_ranks", Path(__file__).parents[1] / "mistakes" / "ranks.py")
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_ranks"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)


@pytest.mark.parametrize("name", mistakes.WRONG)
def test_wrong_answer_is_named(name):
    with pytest.raises(check.CheckFailed) as caught:
        check.ranks(mistakes.WRONG[name])
    assert caught.value.mistake == name, str(caught.value)


@pytest.mark.parametrize("name", mistakes.UNNAMED)
def test_other_wrong_answers_are_refused(name):
    with pytest.raises(check.CheckFailed):
        check.ranks(mistakes.UNNAMED[name])


@pytest.mark.parametrize("name", mistakes.RIGHT)
def test_right_answers_pass(name):
    for seed in range(3):
        verdict = judge(SPEC, mistakes.RIGHT[name], seed)
        assert verdict.points == 5 and "The checks passed: 5 points." in repr(verdict)


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub", "no_answer"}


def test_endless_answer_ends():
    with pytest.raises(check.CheckFailed, match="not finished after 1 s") as caught:
        judge(dataclasses.replace(SPEC, seconds=1.0), mistakes.ENDLESS)
    assert caught.value.mistake == "no_answer"


def test_not_a_function():
    with pytest.raises(check.CheckFailed, match="must be a function, and is a dict"):
        check.ranks({})


def test_environment_is_that_of_two_real_torchruns():
    """The judge's idea of torchrun's variables, against torchrun itself."""
    names = [*environment([1], 0, 0)]
    seen = run(lambda: {name: os.environ[name] for name in names}, 4, nodes=2).results
    for rank, env in enumerate(seen):
        wanted = environment([2, 2], rank // 2, rank % 2)
        assert {k: v for k, v in env.items() if "MASTER" not in k} == {
            k: v for k, v in wanted.items() if "MASTER" not in k
        }
        assert right(env, 0)["rank"] == rank
