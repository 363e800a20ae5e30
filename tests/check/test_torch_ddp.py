"""Exercise 07: each wrong answer gets its own verdict, and no right one is refused."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from course_lib import check
from course_lib.check.engine import judge
from course_lib.check.specs import torch_ddp_accumulate, torch_ddp_onebit

_path = Path(__file__).parents[1] / "mistakes" / "torch_ddp.py"
_spec = importlib.util.spec_from_file_location("mistakes_torch_ddp", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_torch_ddp"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

pytestmark = pytest.mark.slow
SPECS = {"accumulate": torch_ddp_accumulate.SPEC, "onebit_hook": torch_ddp_onebit.SPEC}
WRONG = {"accumulate": mistakes.ACCUMULATE_WRONG, "onebit_hook": mistakes.HOOK_WRONG}
RIGHT = {"accumulate": mistakes.ACCUMULATE_RIGHT, "onebit_hook": mistakes.HOOK_RIGHT}
SENTENCES = {
    "forgets_world_size": "multiply the loss by it",
    "mean_of_means": "samples in the first update: rank 0: 7+",
    "never_zeroes": "Update 1 has its own gradient plus that of the update before",
    "keyed_by_index": "should be .* \\(the parameters in the buckets of this step: \\[\\[1, 3, 0, 2\\]\\]\\)",
    "skips_empty_microbatch": "rank 1 has a microbatch without samples",
}


@pytest.mark.parametrize(("exercise", "name"), [(k, name) for k, found in WRONG.items() for name in found])
def test_wrong_answer_is_named(exercise, name):
    with pytest.raises(check.CheckFailed, match=SENTENCES.get(name)) as caught:
        judge(SPECS[exercise], WRONG[exercise][name])
    assert caught.value.mistake == name, str(caught.value)


@pytest.mark.parametrize(("exercise", "name"), [(k, name) for k, found in RIGHT.items() for name in found])
def test_right_answers_pass(exercise, name):
    verdict = getattr(check, exercise)(RIGHT[exercise][name])
    assert verdict.points == SPECS[exercise].points


@pytest.mark.parametrize("exercise", SPECS)
def test_every_named_mistake_has_an_example(exercise):
    assert {mistake.name for mistake in SPECS[exercise].mistakes} == set(WRONG[exercise]) - {"stub"}


def test_cases_are_fresh_and_uneven():
    for spec in SPECS.values():
        one, other = spec.cases(random.Random(1)), spec.cases(random.Random(2))
        assert not torch.equal(one[0].inputs[0], other[0].inputs[0]) and not torch.equal(*one[0].inputs[:2])
        assert [case.world for case in one] == [3, 3, 2]
    uneven, _, tail = torch_ddp_accumulate.cases(random.Random(1))
    totals = [sum(sizes[0]) for sizes in uneven.options["sizes"]]
    assert len(set(totals)) == 3 and 0 in tail.options["sizes"][1][0]
