"""Exercise 06: each wrong answer gets its own verdict, and no right one is refused."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from course_lib import check, show
from course_lib.check.group import Evidence
from course_lib.check.specs.overlap import CAPACITY, SPEC, cases
from course_lib.check.specs.overlap_seen import fill
from course_lib.check.specs.training_handles import OFTEN, Asked
from course_lib.check.together import collect
from tests.check.one_case import Exercise

_path = Path(__file__).parents[1] / "mistakes" / "overlap.py"
_spec = importlib.util.spec_from_file_location("mistakes_overlap", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_overlap"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow
GROUPS = {  # the case in which a mistake shows; the deep one if it is not here. The full check would take longer
    "frozen_crash": "frozen", "sends_frozen": "frozen", "tied_twice": "tied", "unused_crash": "branch",
    "skips_unused": "branch", "leaves_incomplete": "branch", "waits_in_hook": "late", "barrier_between": "branch",
    "not_begun_anew": "gap", "never_cleared": "gap", "not_by_collectives": "gap",
    "empty_bucket": "tiny",
}  # fmt: skip
SHOWN = {  # the case for these
    mistakes.WithItsLastParameter: "frozen", mistakes.CountsAllGradients: "frozen",
    mistakes.Decimal: "gap", mistakes.OverlapsForFiveSteps: "gap", mistakes.PollsInHook: "deep",
    mistakes.NotToTheLastByte: "gap", mistakes.FrozenTakeRoom: "frozen",
    mistakes.LargeMap: "frozen", mistakes.CountersNotReset: "frozen", mistakes.NothingCleared: "deep",
    mistakes.WaitsAfterAGap: "gap", mistakes.SpreadsFrozen: "frozen",
    mistakes.OneBucketAHook: "waiting", mistakes.OnlyItsOwnTurn: "waiting",
}  # fmt: skip
ELSEWHERE = {  # named as in exercise 05, whose tests have examples
    "destroys_group", "hides_parameters", "frozen_not_broadcast", "no_buffers", "wrong_source", "reseeds",
    "averages_outputs", "no_average", "wrong_divisor", "mean_of_users", "different_order", "through_one_rank",
    "broadcasts_again", "sends_frozen", "no_return", "sums_weights", "reduces_weights",
    "only_one_rank", "copies_rank_0", "leaves_some_out", "loses_digits", "needless_barrier",
    "broadcast_on_some_ranks", "divides_only_the_last",
}  # fmt: skip
BREAKING = (
    "stub",
    "waits_in_hook",
    "order_differs",
    "leaves_incomplete",
    "unused_crash",
    "skips_unused",
    "frozen_crash",
    "barrier_between",
    "empty_bucket",
)
FULL = ("order_differs",)  # as learners see it


EXERCISE = Exercise(SPEC, mistakes, GROUPS, SHOWN, "deep", BREAKING, FULL, ("deep", "branch", "late"))
WRONG, refused, sentence = EXERCISE.wrong, EXERCISE.refused, EXERCISE.sentence


@pytest.fixture(scope="module")
def wrong(many) -> dict[int, Evidence]:
    return EXERCISE.seen_wrong(many)


@pytest.fixture(scope="module")
def right(many) -> dict[str, Evidence]:
    return EXERCISE.seen_right(many)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[f"{k}-{name}" for k, (name, _) in enumerate(WRONG)])
def test_wrong_answer_is_named(number, wrong):
    EXERCISE.assert_named(number, wrong)


@pytest.mark.parametrize("name", mistakes.RIGHT)
def test_right_answers_pass(name, right):
    assert SPEC.compare(right[name]) is None
    assert len(SPEC.praise(right[name])) >= 4


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"} | ELSEWHERE


def test_sentences_say_where_and_why(wrong):
    text = str(refused(mistakes.WRONG["waits_in_hook"], "late"))
    assert "begins its backward only when the others have ended theirs" in text and "inside backward" in text
    assert "deadlock" not in text
    text = sentence(wrong, mistakes.WRONG["too_early"])
    assert "when 24 bytes of gradients were there and 536 were sent" in text


def test_late_buckets_are_counted(wrong):
    text = sentence(wrong, mistakes.OneLate)
    assert "4 of 5 buckets began later than they could. Bucket 0 of 536 bytes was full with gradient 3 of 10" in text
    assert "began with gradient 4" in text and "Each waits until the next one is full, too" in text
    assert "began with gradient 10." in sentence(wrong, mistakes.AfterBackward)


def test_what_a_step_has_left_over_is_said_with_its_step(wrong):
    number = next(k for k, (_, each) in enumerate(WRONG) if each is mistakes.AddsToCounters)
    ways = wrong[number].cases[0].options["ways"]
    step, (rank, way) = next((s, (r, w)) for s, row in enumerate(ways) for r, w in enumerate(row) if w)
    text = sentence(wrong, mistakes.AddsToCounters)
    assert (
        f"In step {step} it did not use {way}.weight and {way}.bias" in text and f"step {step + 1}, rank {rank}" in text
    )


def test_pieces_are_told_from_small_buckets(wrong):
    assert "several pieces" in sentence(wrong, mistakes.InHalves)
    assert "as far as the next gradient still fits" in sentence(wrong, mistakes.HalfBuckets)


def test_what_is_sent_beside_the_buckets_is_told(wrong):
    assert "One bucket has no gradient in it." in sentence(wrong, mistakes.SendsEmpty)
    assert "beside them 80 bytes travel" in sentence(wrong, mistakes.LargeMap)
    assert "frozen parameters take room" in sentence(wrong, mistakes.FrozenTakeRoom)
    assert "> and not >=" in sentence(wrong, mistakes.NotToTheLastByte)
    assert "3800, 5120, 5120 bytes, not 536, 5120, 320" in sentence(wrong, mistakes.FirstFit)


def test_what_a_step_leaves_behind_is_told(wrong):
    text = sentence(wrong, mistakes.CountersNotReset)
    assert "Up to step 0 all gradients are right" in text and "when 24 bytes of gradients were there" in text
    assert "But in step 1 no all-reduce is made" in sentence(wrong, mistakes.NothingCleared)
    assert "although parameters have hooks" in sentence(wrong, mistakes.LateBinding)
    assert "Let each parameter tell" in sentence(wrong, mistakes.WRONG["starts_in_synchronize"])


class Handle:
    """Of an all-reduce that is over in the end."""

    def __init__(self) -> None:
        self.left = 3 * OFTEN

    def is_completed(self):
        self.left -= 1
        return self.left < 0


def test_asking_again_and_again_is_stopped_inside_backward_only():
    asked, weight = Asked([[]]), torch.ones(2, requires_grad=True)

    def ask(_=None):
        handle = Handle()
        while not handle.is_completed():
            asked()

    ask()  # after backward this is a way to wait
    weight.register_post_accumulate_grad_hook(ask)
    with pytest.raises(RuntimeError, match="again and again inside backward"):
        weight.sum().backward()


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
