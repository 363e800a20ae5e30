"""Exercise 05: each wrong answer gets its own verdict, no right one is refused, and the oracle is right."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

from course_lib import check, run, show
from course_lib.check.group import Evidence
from course_lib.check.specs import training
from course_lib.check.specs.data_parallel import SPEC, cases
from course_lib.check.specs.training_looks import of_the_loop
from course_lib.check.specs.training_oracle import RIGHT
from course_lib.check.specs.training_seen import COURSES, OURS
from course_lib.launch.rank import Rank
from course_lib.parallel import link
from tests.check.one_case import Exercise

_path = Path(__file__).parents[1] / "mistakes" / "data_parallel.py"
_spec = importlib.util.spec_from_file_location("mistakes_data_parallel", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_data_parallel"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow
GROUPS = {  # the case in which a mistake shows; the plain one if it is not here. The full check would take longer
    "frozen_crash": "frozen", "frozen_not_broadcast": "frozen", "sends_frozen": "frozen", "tied_twice": "tied",
    "no_buffers": "norm", "unused_crash": "branch", "mean_of_users": "branch", "skips_unused": "branch",
    "order_of_arrival": "branch", "barrier_between": "branch", "never_cleared": "long", "not_by_collectives": "long",
    "other_size": "branch",
}  # fmt: skip
SHOWN = {  # the case for these
    mistakes.OnlyTenSteps: "long", mistakes.SpreadsFrozen: "frozen", mistakes.OnlyRank0BroadcastsBuffers: "norm",
}  # fmt: skip
BREAKING = (
    "stub", "destroys_group", "hides_parameters", "frozen_crash", "unused_crash", "skips_unused", "no_return",
    "order_of_arrival", "barrier_between", "other_size", "broadcast_on_some_ranks",
)  # fmt: skip
FULL = ("no_average", "destroys_group")  # as learners see it


EXERCISE = Exercise(SPEC, mistakes, GROUPS, SHOWN, "plain", BREAKING, FULL, ("plain", "branch", "norm"))
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
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"}


def test_sentences_say_where_and_why(wrong):
    text = sentence(wrong, mistakes.WRONG["tied_twice"])
    assert "3 ranks, a model with tied weights: step 0, rank 0: the gradient after synchronize() of 2." in text
    text = str(refused(mistakes.WRONG["skips_unused"], "branch"))
    assert "in step 0 rank 0 has 6, rank 1 has 6, rank 2 has 4 of 10" in text


def test_sentences_say_in_which_steps(wrong):
    assert "All is right up to step 9; in step 10 each" in sentence(wrong, mistakes.OnlyTenSteps)
    assert "All is right up to step 0; in step 1 each" in sentence(wrong, mistakes.EveryOtherStep)
    assert "sent again in every step." in sentence(wrong, mistakes.BroadcastsEachStep)
    assert "sent again in step 1." in sentence(wrong, mistakes.RebroadcastsEverySecondStep)


def test_what_is_broadcast_again_is_told(wrong):
    assert "Frozen parameters are sent again in every step. Nothing" in sentence(wrong, mistakes.SpreadsFrozen)
    assert "Gradients are broadcast in every step. An all-red" in sentence(wrong, mistakes.SpreadsGradients)
    assert "step 1, rank 0: barrier (" in sentence(wrong, mistakes.BarrierInEachForward)


def test_what_is_missing_is_told():
    text = str(refused(mistakes.Unfinished, "plain"))
    assert text.startswith("NaiveDDP is not finished: synchronize (data_parallel.py, line ")
    assert "called neither the module nor a layer" in str(refused(mistakes.NeverCallsTheModule, "plain"))


def test_a_file_that_is_named_as_one_of_the_judge_s_is_told_apart():
    rank = Rank.__new__(Rank)
    rank.plan = {"cells": {"cell.py": "Cell In[3]"}}
    assert rank.label(training.__file__, 7).startswith(OURS) and rank.label(link.__file__, 7).startswith(COURSES)
    assert rank.label("/some/where/training.py", 7) == "where/training.py, line 7"
    assert rank.label("/some/where/link.py", 7) == "where/link.py, line 7"
    assert (
        rank.label("/some/where/mine.py", 7) == "mine.py, line 7" and rank.label("cell.py", 7) == "Cell In[3], line 7"
    )


def test_barriers_of_the_check_are_told_as_such():
    text = (
        "rank 0 waits in barrier (training.py, line 9), but rank 1 does not call it: it was computing (my.py, line 3)."
        "\nrank 0 calls barrier with 0 bytes (training.py, line 9), rank 1 calls barrier with 0 bytes (my.py, line 3)"
        "\nrank 2: lost its connection (training.py, line 9)"
    )
    assert of_the_loop(text) == (
        "rank 0 waits in a barrier of the check, but rank 1 does not call it: it was computing (my.py, line 3)."
        "\nrank 0 calls a barrier of the check, rank 1 calls barrier with 0 bytes (my.py, line 3)"
        "\nrank 2: lost its connection"
    )


def test_a_divisor_is_named_with_where_it_is_right(wrong):
    assert "divided by 2. That is right with two ranks only." in sentence(wrong, mistakes.HalfBefore)
    assert "divided by 4. Divide by dist.get_world_size()" in sentence(wrong, mistakes.DividesByBatch)


def test_what_did_not_travel_is_counted(wrong):
    nbytes = 8 * (5 * 3 + 3)
    text = sentence(wrong, mistakes.ThroughTheStore)
    assert f"the gradients have {nbytes} bytes, and in all calls of torch.distributed the 2 ranks sent 0." in text


def test_nobody_can_know_the_number_of_steps():
    steps = {next(case for case in cases(random.Random(k)) if case.group == "long").steps for k in range(4)}
    assert len(steps) > 2 and min(steps) > 10


def test_verdict_holds_the_numbers_and_messages_of_a_run():
    verdict = check.naive_ddp(mistakes.RIGHT["as the solution"])
    reduced = [m for m in verdict.run.messages if m.op == "all_reduce" and m.rank == 0]
    gradients = 8 * (5 * 8 + 8 + 8 * 3 + 3)
    assert len(reduced) == 3 * 4 and sum(m.nbytes for m in reduced) == 3 * gradients
    assert f"4 all-reduces with {gradients} bytes for {gradients} bytes of gradients" in repr(verdict)
    assert show.messages(verdict.run)


def by_torch(options, inputs) -> dict[str, torch.Tensor]:
    """torch's DDP and torch's optimizer in the same loop."""

    class Wrapped(nn.parallel.DistributedDataParallel):
        def synchronize(self):
            """DDP has done it in backward."""

    class Plainly(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.ddp = Wrapped(module, find_unused_parameters=True)

        def forward(self, *args):
            return self.ddp(*args)

        def synchronize(self):
            pass

    return [
        training.train(Plainly, tensors[torch.distributed.get_rank()], **each)[1]
        for each, tensors in zip(options, inputs, strict=True)
    ]


def test_the_oracle_agrees_with_torch():
    three = [case for case in cases(random.Random(3)) if case.world == 3]
    results = run(by_torch, 3, args=([c.options for c in three], [c.inputs for c in three]), quiet=True, start="direct")
    for rank, found in enumerate(results.results):
        for case, theirs in zip(three, found, strict=True):
            for name, right in case.truth.weight.items():
                torch.testing.assert_close(theirs[f"weight/{name}"], right, **RIGHT, msg=f"{case.story}, rank {rank}")
            for name, right in case.truth.start.items():
                assert torch.equal(theirs[f"start/{name}"], right)


def test_cases_are_fresh_and_hold_the_traps():
    one, other = cases(random.Random(1)), cases(random.Random(2))
    assert not torch.equal(one[0].inputs[0], other[0].inputs[0]) and not torch.equal(*one[0].inputs[:2])
    assert [case.world for case in one] == sorted((case.world for case in one), reverse=True)
    truth = {case.group: case.truth for case in one if case.world == 3}
    assert set(truth) == {"plain", "frozen", "tied", "norm", "branch"}
    for each in truth.values():  # ranks are built differently, buffers too
        assert not any(torch.equal(each.built[0][n], each.built[k][n]) for n in each.start for k in (1, 2))
    assert "first.weight" in truth["frozen"].start and "first.weight" not in truth["frozen"].grad
    assert "6.weight" in truth["tied"].start and "6.weight" not in truth["tied"].grad
    users = {
        name: [[not bool(local[name][step].isnan().any()) for local in truth["branch"].local] for step in range(3)]
        for name in ("ways.0.weight", "nobody.bias", "head.bias")
    }
    assert users["ways.0.weight"] == [[True, False, False], [False] * 3, [False, False, True]]
    assert users["nobody.bias"] == [[False] * 3] * 3 and users["head.bias"] == [[True] * 3] * 3
