"""Exercise 06: each wrong answer gets its own verdict, and no right one is refused."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from course_lib import check, show
from course_lib.check import engine
from course_lib.check.engine import judge
from course_lib.check.group import Evidence
from course_lib.check.specs.overlap import CAPACITY, SPEC, cases
from course_lib.check.specs.overlap_mistakes import fill
from course_lib.check.together import collect

_path = Path(__file__).parents[1] / "mistakes" / "overlap.py"
_spec = importlib.util.spec_from_file_location("mistakes_overlap", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_overlap"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow
WRONG = [*mistakes.WRONG.items(), *mistakes.AGAIN]
GROUPS = {  # the case in which a mistake shows; the deep one if it is not here. The full check would take longer
    "frozen_crash": "frozen", "sends_frozen": "frozen", "tied_twice": "tied", "unused_crash": "branch",
    "skips_unused": "branch", "leaves_incomplete": "branch", "waits_in_hook": "late",
}  # fmt: skip
SHOWN = {mistakes.WithItsLastParameter: "frozen", mistakes.CountsAllGradients: "frozen"}  # the case for these
ELSEWHERE = {  # named as in exercise 05, whose tests have examples
    "destroys_group", "hides_parameters", "frozen_not_broadcast", "no_buffers", "wrong_source", "reseeds",
    "averages_outputs", "no_average", "wrong_divisor", "mean_of_users", "different_order", "through_one_rank",
    "broadcasts_each_step", "sends_frozen", "only_one_rank", "copies_rank_0", "leaves_some_out", "loses_digits",
}  # fmt: skip
BREAKING = (
    "stub",
    "waits_in_hook",
    "order_differs",
    "leaves_incomplete",
    "unused_crash",
    "skips_unused",
    "frozen_crash",
)
FULL = ("starts_in_synchronize", "waits_in_hook", "order_differs", "too_early")  # as learners see it


def refused(answer, group=None) -> check.CheckFailed:
    with pytest.raises(check.CheckFailed) as caught:
        judge(replace(SPEC, cases=lambda rng: [of(group, rng)]) if group else SPEC, answer)
    return caught.value


def of(group: str, rng: random.Random, world: int = 3):
    return next(case for case in cases(rng) if case.world == world and case.group == group)


@pytest.fixture(scope="module")
def wrong(many) -> dict[int, Evidence]:
    """What is seen of the wrong answers that come to their end."""
    ending = [k for k, (name, answer) in enumerate(WRONG) if name not in BREAKING and not whole(name, answer)]
    world = {k: 2 if WRONG[k][1] is mistakes.Decimal else 3 for k in ending}
    group = {k: SHOWN.get(WRONG[k][1]) or GROUPS.get(WRONG[k][0], "deep") for k in ending}
    return many({k: (WRONG[k][1], [of(group[k], random.Random(k), world[k])]) for k in ending})


@pytest.fixture(scope="module")
def right(many) -> dict[str, Evidence]:
    """What is seen of the right answers; another seed for each, and the same in each run."""
    return many({name: (answer, cases(random.Random(len(name)))) for name, answer in mistakes.RIGHT.items()})


def whole(name, answer) -> bool:
    return name in FULL and answer is mistakes.WRONG[name]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[f"{k}-{name}" for k, (name, _) in enumerate(WRONG)])
def test_wrong_answer_is_named(number, wrong):
    name, answer = WRONG[number]
    if number in wrong:
        told = SPEC.compare(wrong[number])
        named = engine._named(SPEC, wrong[number], told)
        assert named and named[0].name == name, told
    else:
        found = refused(answer, None if whole(name, answer) else GROUPS.get(name, "deep"))
        assert found.mistake == name, str(found)


@pytest.mark.parametrize("name", mistakes.RIGHT)
def test_right_answers_pass(name, right):
    assert SPEC.compare(right[name]) is None
    assert len(SPEC.praise(right[name])) >= 4


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"} | ELSEWHERE


def test_sentences_say_where_and_why():
    text = str(refused(mistakes.WRONG["waits_in_hook"], "late"))
    assert "begins its backward only when the others have ended theirs" in text and "inside backward" in text
    assert "deadlock" not in text
    text = str(refused(mistakes.WRONG["too_early"], "deep"))
    assert "when 24 bytes of gradients were there and 536 were sent" in text


def test_verdict_holds_the_numbers_and_messages_of_a_run():
    verdict = check.bucketed_ddp(mistakes.RIGHT["as the solution"])
    reduced = [m.nbytes for m in verdict.run.messages if m.op == "all_reduce" and m.rank == 0]
    # By hand: 24 + 384 + 128, then 5120 alone, then 320, to which 5120 do not fit, and 128 + 2048 + 128 + 640.
    assert reduced == 3 * [536, 5120, 320, 5120, 2944]
    assert "5 all-reduces for 10 gradients" in repr(verdict) and "11096 of 14040 bytes were under way" in repr(verdict)
    assert show.messages(verdict.run)


def test_rule_of_the_buckets():
    sizes = [640, 128, 2048, 128, 5120, 320, 5120, 128, 384, 24]
    assert fill(sizes, CAPACITY, backwards=True) == [536, 5120, 320, 5120, 2944]
    assert fill([1, 2, 3], 3, backwards=True) == [3, 3] and fill([1, 2, 3], 3, backwards=False) == [3, 3]


def test_backward_of_a_late_rank_begins_when_the_others_have_ended():
    """Otherwise waiting inside a hook would not be seen."""
    late = [case for case in cases(random.Random(5)) if case.group == "late"]
    e = Evidence(late)
    collect(mistakes.RIGHT["as the solution"], e, [0], 20.0)
    patient = late[0].options["patient"]
    times = [answer.facts["times"][0] for answer in e.answers[0]]
    assert all(times[patient][1] >= ended for rank, (_, _, ended, _) in enumerate(times) if rank != patient)
