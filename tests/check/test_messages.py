"""Exercise 02: each wrong answer gets its own verdict, no right one is refused."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check
from course_lib.check import engine, together
from course_lib.check.engine import judge
from course_lib.check.group import GroupCase
from course_lib.check.specs.messages import LARGE, SPEC

_path = Path(__file__).parents[1] / "mistakes" / "messages.py"
_spec = importlib.util.spec_from_file_location("mistakes_messages", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_messages"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

pytestmark = pytest.mark.slow
WRONG = [*mistakes.WRONG.items(), *mistakes.AGAIN]
ROWS = {f"{k}-{name}": (name, answer) for k, (name, answer) in enumerate(WRONG)}
ROWS |= {f"right-{name}": (None, answer) for name, answer in mistakes.RIGHT.items()}
END_BADLY = {  # or may: so each has ranks of its own
    row for row, (name, _) in ROWS.items() if name in (
        "stub", "no_modulo", "sends_first", "receives_first", "wrong_neighbour", "buffer_dtype", "wrong_handle",
        "send_not_waited", "fails_alone", "wrong_tag", "ends_do_not_meet", "returns_handle", "destroys_group",
    )
}  # fmt: skip


FOUR = {"WORLD_SIZE and RANK", "odd and even", "in two halves", "named arguments"}  # right: on 4 ranks; others: on 3
WHOLE = {"sends_first", "fails_alone"}  # of END_BADLY: judged on all cases, as learners see it


def some_cases(row: str) -> list[GroupCase]:
    """Fresh numbers for each answer. Wrong: the cases of 3 ranks, or all if its name rests on the number of ranks."""
    (name, _), made = ROWS[row], SPEC.cases(random.Random(row))
    if name:
        return [case for case in made if case.world == 3 or name == "two_ranks_only"]
    most = 4 if row.removeprefix("right-") in FOUR else 3
    return [c for c in made if c.world in (most, 2, 1) or (c.world, c.inputs[0].numel()) == (4, LARGE)]


@pytest.fixture(scope="module")
def seen(many):
    """The evidence of all answers that come to their end, from one start of ranks."""
    return many({row: (answer, some_cases(row)) for row, (_, answer) in ROWS.items() if row not in END_BADLY})


@pytest.mark.parametrize("row", ROWS)
def test_wrong_answer_is_named_and_right_ones_pass(seen, row):
    name, answer = ROWS[row]
    if row in seen and row.startswith("right"):
        wrong = SPEC.compare(seen[row])
        assert wrong is None, wrong.text
        assert SPEC.praise(seen[row])
        return
    if row in seen:
        found = engine.told(SPEC, seen[row])
    else:
        with pytest.raises(check.CheckFailed) as caught:
            chosen = SPEC.cases if name in WHOLE else lambda rng: some_cases(row)
            judge(replace(SPEC, cases=chosen, seconds=8.0), answer)  # where a send is dropped gloo's threads never rest
        found = caught.value
    assert found.mistake == name, str(found)


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
    assert "rank 0 has finished this case, rank 1 has not: it was computing" in str(caught.value)


def test_points():
    verdict = judge(SPEC, next(iter(mistakes.RIGHT.values())))
    assert verdict.points == 5 and "The checks passed: 5 points." in repr(verdict)


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"}


def test_not_a_function():
    with pytest.raises(check.CheckFailed, match="shift must be a function, and is a NoneType"):
        check.messages(None)
