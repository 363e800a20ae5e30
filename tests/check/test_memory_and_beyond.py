"""Exercise 12: each wrong answer gets its own verdict, no right one is refused, and the oracles are right."""

import functools
import importlib.util
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from course_lib import check, show
from course_lib.check import engine
from course_lib.check.group import Evidence
from course_lib.check.spec import Answer
from course_lib.check.specs import bubble_oracle, zero_one, zero_one_drive
from course_lib.check.specs.bubble import SPEC as BUBBLE
from course_lib.check.specs.training_models import build, loss_of
from course_lib.check.specs.zero_one import SPEC as ZERO
from course_lib.parallel import pipeline_schedule

_path = Path(__file__).parents[1] / "mistakes" / "memory_and_beyond.py"
_spec = importlib.util.spec_from_file_location("mistakes_memory_and_beyond", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_memory_and_beyond"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

pytestmark = pytest.mark.slow
SEEDS = range(3)

# ZeroOne: answers that come back share one start of four ranks

GROUPS = {  # the case in which a mistake shows: (group, world); ("plain", 4) if it is not here
    "destroys_group": ("plain", 1), "frozen_crash": ("frozen", 3), "frozen_moves": ("frozen", 3),
    "unused_crash": ("branch", 3), "skips_unused": ("branch", 3),
}  # fmt: skip
BREAKING = (
    mistakes.Stub, mistakes.Destroys, mistakes.GeneratorTwice, mistakes.NoPadding, mistakes.NoPaddingView,
    mistakes.NoPaddingLists, mistakes.LeafInPlace, mistakes.ParameterIsSent, mistakes.FrozenCrash,
    mistakes.UnusedCrash, mistakes.SkipsUnused, mistakes.EachUsedParameter,
)  # fmt: skip
ZERO_WRONG = [*mistakes.ZERO_WRONG.items(), *mistakes.ZERO_AGAIN]
WHOLE = (mistakes.NoPadding, mistakes.SkipsUnused)  # judged on all cases, as learners see it


@functools.cache
def zero_cases(seed):
    """Of one of three sets: to make one takes longer than to run a case."""
    return zero_one.cases(random.Random(seed))


def zero_case(name, seed):
    group, world = GROUPS.get(name, ("plain", 4))
    return next(c for c in zero_cases(seed % len(SEEDS)) if (c.group, c.world) == (group, world))


@pytest.fixture(scope="module")
def zero_wrong(many) -> dict[int, Evidence]:
    """What is seen of the wrong answers that come to their end, the same in each run."""
    ending = [k for k, (_, answer) in enumerate(ZERO_WRONG) if answer not in BREAKING]
    return many({k: (ZERO_WRONG[k][1], [zero_case(ZERO_WRONG[k][0], k)]) for k in ending})


@pytest.fixture(scope="module")
def zero_right(many) -> dict[str, Evidence]:
    """What is seen of the right answers in all cases."""
    right = enumerate(mistakes.ZERO_RIGHT.items())
    return many({name: (answer, zero_cases(k % len(SEEDS))) for k, (name, answer) in right})


def refused(answer, name=None) -> check.CheckFailed:
    with pytest.raises(check.CheckFailed) as caught:
        engine.judge(replace(ZERO, cases=lambda rng: [zero_case(name, 0)]) if name else ZERO, answer)
    return caught.value


@pytest.mark.parametrize("k", range(len(ZERO_WRONG)), ids=[f"{name}-{k}" for k, (name, _) in enumerate(ZERO_WRONG)])
def test_wrong_zero_one_is_named(k, zero_wrong):
    name, answer = ZERO_WRONG[k]
    if answer in BREAKING:
        found = refused(answer, None if answer in WHOLE else name)
        assert found.mistake == name, str(found)
    else:
        told = ZERO.compare(zero_wrong[k])
        assert told is not None
        known = engine._named(ZERO, zero_wrong[k], told)
        assert known and known[0].name == name, f"{told.text} {known}"


@pytest.mark.parametrize("name", mistakes.ZERO_RIGHT)
def test_right_zero_one_passes(name, zero_right):
    told = ZERO.compare(zero_right[name])
    assert told is None, told.text


def test_sentences_say_where_and_how_much(zero_wrong):
    by_class = {ZERO_WRONG[k][1]: str(engine.told(ZERO, evidence)) for k, evidence in zero_wrong.items()}
    text = by_class[mistakes.AllReduces]
    assert "4 ranks, a model of two layers (75 weights), Adam: step 0, rank 0: all_reduce of 608 bytes" in text
    assert "sends 1368 bytes" in text and "need 900" in text  # 2 * 3/4 * 608 + 3 * 152; 2 * 3/4 * 600
    text = by_class[mistakes.Whole]
    assert "keeps 150 numbers" in text and "about 38 each" in text


def test_verdict_of_zero_one_holds_the_numbers_and_the_messages_of_a_run():
    verdict = check.zero_one(mistakes.ZERO_RIGHT["as the solution"])
    assert "The checks passed: 8 points." in repr(verdict)
    assert "keeps 150 numbers in one process, and 38, 38, 38, 38 on your four ranks" in repr(verdict)
    found = [(m.op, m.nbytes) for m in verdict.run.messages if m.rank == 2]
    assert found == [("reduce_scatter_single", 608), ("all_gather_single", 152)] * 3
    assert show.messages(verdict.run)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_oracle_of_zero_one_agrees_with_torch_s_optimizers(seed):
    for case in zero_cases(seed):
        model, options = build(case.options["model"], case.options["seed"]), case.options
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = zero_one_drive.OPTIMIZERS[options["optimizer"]](trained)
        assert torch.equal(parameters_to_vector(model.parameters()), case.start)
        for step, ways in enumerate(options["ways"]):
            optimizer.zero_grad()
            losses = [loss_of(model, data[step], way) for data, way in zip(case.inputs, ways, strict=True)]
            torch.stack(losses).mean().backward()
            optimizer.step()
            weights = parameters_to_vector(model.parameters())
            torch.testing.assert_close(weights, case.weights[step], rtol=1e-10, atol=1e-13)


def test_cases_of_zero_one_are_fresh_and_hold_the_traps():
    one, other = zero_cases(1), zero_cases(2)
    assert not torch.equal(one[0].start, other[0].start) and not torch.equal(*one[0].inputs[:2])
    assert [case.world for case in one] == [4, 4, 3, 3, 2, 1]
    left_over = {(case.group, case.world): case.numbers % case.world for case in one}
    assert left_over == {
        ("plain", 4): 3, ("tied", 4): 1, ("frozen", 3): 0, ("branch", 3): 1, ("plain", 2): 1, ("plain", 1): 0,
    }  # fmt: skip
    frozen = next(case for case in one if case.group == "frozen")
    assert torch.equal(frozen.weights[:, ~frozen.trained], frozen.start[~frozen.trained].expand(3, -1))
    assert len(frozen.start) - frozen.numbers == 5 * 6 + 7 and {case.kept for case in one} == {0, 1, 2}


# bubble: judged without processes, on the cases of several seeds

BUBBLE_WRONG = [row for row in mistakes.BUBBLE_WRONG.items() if row[0] != "stub"] + mistakes.BUBBLE_AGAIN


@pytest.fixture(scope="module")
def bubble_cases():
    return {seed: BUBBLE.cases(random.Random(seed)) for seed in SEEDS}


def first_failure(function, cases):
    """(name or None, text) of the first case that is not right, as the engine finds it."""
    for case in cases:
        try:
            answer = Answer(function(*case.inputs))
        except (ArithmeticError, LookupError, AttributeError) as error:
            answer = Answer(error=type(error).__name__, message=str(error))
        if wrong := BUBBLE.compare(case, answer):
            failed = engine._failure(BUBBLE, case, answer, wrong)
            return failed.mistake, str(failed)
    return None


@pytest.mark.parametrize(("name", "function"), BUBBLE_WRONG, ids=[f"{n}-{k}" for k, (n, _) in enumerate(BUBBLE_WRONG)])
def test_wrong_bubble_is_named(bubble_cases, name, function):
    for seed in SEEDS:
        found = first_failure(function, bubble_cases[seed])
        assert found and found[0] == name, (seed, found)


@pytest.mark.parametrize("name", mistakes.BUBBLE_UNNAMED)
def test_other_wrong_bubbles_are_refused(bubble_cases, name):
    function, text = mistakes.BUBBLE_UNNAMED[name]
    mistake, told = first_failure(function, bubble_cases[0])
    assert mistake is None and text in told


@pytest.mark.parametrize("name", mistakes.BUBBLE_RIGHT)
def test_right_bubbles_pass(bubble_cases, name):
    assert [first_failure(mistakes.BUBBLE_RIGHT[name], bubble_cases[seed]) for seed in (0, 1)] == [None, None]


@pytest.mark.parametrize("make", [pipeline_schedule.gpipe, pipeline_schedule.one_f_one_b])
def test_the_oracle_of_the_bubble_has_the_closed_formula_for_equal_stages(make):
    for stages in range(1, 6):
        for microbatches in range(1, 8):
            found = bubble_oracle.waiting(make(stages, microbatches), [300] * stages, [700] * stages)
            assert found == pytest.approx((stages - 1) / (microbatches + stages - 1), rel=1e-12)
            spans = pipeline_schedule.timeline(make(stages, microbatches), 300, 700)
            assert found == pytest.approx(pipeline_schedule.idle(spans), rel=1e-12)


def test_the_oracle_of_the_bubble_is_right_for_unequal_stages():
    """Two by hand; and GPipe, where the slowest stage paces a line of equal jobs there, and another one back."""
    # stage 0: F 0-1, B 6-8; stage 1: F 1-4, B 4-6. Of 2 * 8, work is 1 + 2 + 3 + 2 = 8.
    assert bubble_oracle.waiting(pipeline_schedule.gpipe(2, 1), [1, 3], [2, 2]) == 0.5
    # 1F1B with 2 microbatches: F0 0-1, F1 1-2, B0 6-8, B1 11-13; F0 1-4, B0 4-6, F1 6-9, B1 9-11. Work 6 + 10 of 26.
    assert bubble_oracle.waiting(pipeline_schedule.one_f_one_b(2, 2), [1, 3], [2, 2]) == pytest.approx(10 / 26)
    rng = random.Random(5)
    for stages, microbatches in ((2, 3), (3, 1), (4, 7)):
        forward, backward = ([rng.randint(1, 99) for _ in range(stages)] for _ in range(2))
        whole = sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))
        want = 1 - microbatches * (sum(forward) + sum(backward)) / (stages * whole)
        found = bubble_oracle.waiting(pipeline_schedule.gpipe(stages, microbatches), forward, backward)
        assert math.isclose(found, want, rel_tol=1e-12)
    with pytest.raises(ValueError, match="for ever"):
        bubble_oracle.waiting([[("forward", 0), ("backward", 0), ("forward", 1)], [("forward", 1)]], [1, 1], [1, 1])


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in ZERO.mistakes} == set(mistakes.ZERO_WRONG) - {"stub"}
    assert {mistake.name for mistake in BUBBLE.mistakes} == set(mistakes.BUBBLE_WRONG) - {"stub"}


def test_the_public_name_of_the_bubble_judges_the_same():
    assert "The checks passed: 6 points." in repr(check.bubble(mistakes.BUBBLE_RIGHT["as the solution"]))
    with pytest.raises(check.CheckFailed, match="still the stub"):
        check.bubble(mistakes.BUBBLE_WRONG["stub"])
