"""Exercise 09: each wrong answer gets its own verdict, no right one is refused, and the oracles are right."""

import importlib.util
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch

from course_lib import check
from course_lib.check import engine
from course_lib.check.group import Evidence
from course_lib.check.spec import Answer
from course_lib.check.specs import recipe_rate
from course_lib.check.specs.recipe_drive import drive
from course_lib.check.specs.recipe_oracle import found_in
from course_lib.check.specs.recipe_rate import SPEC as RATE
from course_lib.check.specs.recipe_update import SPEC as UPDATE
from course_lib.check.together import collect
from course_lib.train.schedule import rate, scaled

_path = Path(__file__).parents[1] / "mistakes" / "recipe.py"
_spec = importlib.util.spec_from_file_location("mistakes_recipe", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_recipe"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

pytestmark = pytest.mark.slow
SEEDS = range(5)
ALONE = ("stub", "leaves_early", "unscales_twice", "update_missing", "updates_twice")  # these end badly
ENDS = [(name, mistakes.UPDATE_WRONG[name]) for name in ALONE if name != "stub"] + mistakes.UPDATE_ENDS
WRONG = [row for row in mistakes.UPDATE_WRONG.items() if row[0] not in ALONE] + mistakes.UPDATE_AGAIN
TOGETHER = WRONG + list(mistakes.UPDATE_RIGHT.items())


def names_of(spec):
    return {mistake.name for mistake in spec.mistakes}


# learning_rate: judged without processes, on the cases of several seeds


def first_failure(function, seed):
    """(name or None, text) of the first case that is not right, as the engine finds it."""
    for case in RATE.cases(random.Random(seed)):
        try:
            answer = Answer(function(*case.inputs))
        except (ArithmeticError, LookupError) as error:
            answer = Answer(error=type(error).__name__, message=str(error))
        if wrong := RATE.compare(case, answer):
            failed = engine._failure(RATE, case, answer, wrong)
            return failed.mistake, str(failed)
    return None


@pytest.mark.parametrize(
    ("name", "function"),
    [row for row in mistakes.RATE_WRONG.items() if row[0] != "stub"] + mistakes.RATE_AGAIN,
)
def test_wrong_rate_is_named(name, function):
    for seed in SEEDS:
        found = first_failure(function, seed)
        assert found and found[0] == name, (seed, found)


@pytest.mark.parametrize("name", mistakes.RATE_UNNAMED)
def test_other_wrong_rates_are_refused(name):
    function, text = mistakes.RATE_UNNAMED[name]
    mistake, told = first_failure(function, 0)
    assert mistake is None and text in told


@pytest.mark.parametrize("name", mistakes.RATE_RIGHT)
def test_right_rates_pass(name):
    assert [first_failure(mistakes.RATE_RIGHT[name], seed) for seed in SEEDS] == [None] * len(SEEDS)


def test_what_is_expected_is_what_the_loop_does():
    for case in RATE.cases(random.Random(3)):
        step, total, warmup, base, reference, batch, ranks, optimizer = case.inputs
        peak = scaled(base, batch * ranks, reference, optimizer)
        assert case.expected == pytest.approx(rate(step, total, peak, warmup), rel=1e-12)
    assert recipe_rate.right(5, 90, 5, 0.1, 256, 64, 8, "sgd") == pytest.approx(0.2, rel=1e-12)


# update: answers that come back share one start of three ranks


def one_of_many(which, samples, number, **options):
    return drive(which(number), samples, **options)


@pytest.fixture(scope="module")
def seen():
    """The evidence of all answers that come back: the case of three ranks, from ranks that were started once."""
    found = [UPDATE.cases(random.Random(k))[0] for k, _ in enumerate(TOGETHER)]
    numbered = [replace(c, drive=one_of_many, options=c.options | {"number": k}) for k, c in enumerate(found)]
    e, answers = Evidence(numbered), [answer for _, answer in TOGETHER]
    collect(answers.__getitem__, e, range(len(found)), 60.0)
    assert not e.broken, e.broken
    return [Evidence([case], {0: e.answers[k]}) for k, case in enumerate(found)]


@pytest.mark.parametrize("k", range(len(TOGETHER)), ids=[f"{name}-{k}" for k, (name, _) in enumerate(TOGETHER)])
def test_what_came_back_is_named_or_passes(seen, k):
    name, _ = TOGETHER[k]
    wrong = UPDATE.compare(seen[k])
    if name in names_of(UPDATE):
        assert wrong is not None
        known = engine._named(UPDATE, seen[k], wrong)
        assert known and known[0].name == name, f"{wrong.text} {known}"
        assert "{" not in known[1]
    else:
        assert wrong is None, wrong.text


@pytest.mark.parametrize(("name", "answer"), ENDS, ids=[f"{name}-{k}" for k, (name, _) in enumerate(ENDS)])
def test_what_ends_badly_is_named(name, answer):
    with pytest.raises(check.CheckFailed) as caught:
        engine.judge(UPDATE, answer)
    assert caught.value.mistake == name, str(caught.value)


def test_the_public_names_judge_the_same():
    verdict = check.learning_rate(mistakes.RATE_RIGHT["as the solution"])
    assert "The checks passed: 5 points." in repr(verdict)
    verdict = check.update(mistakes.UPDATE_RIGHT["as the solution"])
    assert "The checks passed: 7 points." in repr(verdict)
    for function, wrong in ((check.learning_rate, mistakes.RATE_WRONG), (check.update, mistakes.UPDATE_WRONG)):
        with pytest.raises(check.CheckFailed) as caught:
            function(wrong["stub"])
        assert caught.value.mistake in ("stub", None) and "still the stub" in str(caught.value)


def test_every_named_mistake_has_an_example():
    assert names_of(RATE) == set(mistakes.RATE_WRONG) - {"stub"}
    assert names_of(UPDATE) == set(mistakes.UPDATE_WRONG) - {"stub"}


def test_the_oracle_is_a_gradient_by_hand(seen):
    """Softmax minus one-hot, times the inputs, as sums over all samples of all ranks: without autograd."""
    evidence = seen[len(WRONG)]
    found, case = found_in(evidence, 0, 0), evidence.cases[0]
    first, second = (found.before[0][a:b].view(shape) for a, b, shape in ((0, 35, (7, 5)), (42, 63, (3, 7))))
    biases = found.before[0][35:42], found.before[0][63:]
    total = torch.zeros(3, 7, dtype=torch.float64)
    for row in torch.cat([samples[0] for samples in case.inputs]):
        hidden = torch.tanh(first @ row[:5] + biases[0])
        scores = (second @ hidden + biases[1]).exp()
        errors = scores / scores.sum()
        errors[int(row[5])] -= 1
        total += torch.outer(errors, hidden)
    want = total / sum(len(samples[0]) for samples in case.inputs)
    assert torch.allclose(found.mean[42:63].view(3, 7), want, rtol=1e-12, atol=0)
    assert math.isclose(found.right.norm().item(), 0.05, rel_tol=1e-4) and found.mean.norm() > 0.05
