"""Exercise 08: each wrong answer gets its own verdict, no right one is refused, and the oracle is right."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from course_lib import check
from course_lib.check.engine import judge
from course_lib.check.specs import data_evaluate
from course_lib.check.specs.data_evaluate_mistakes import SPEC as EVALUATE
from course_lib.check.specs.data_shard import indices
from course_lib.check.specs.data_shard_mistakes import SPEC as SHARD

_path = Path(__file__).parents[1] / "mistakes" / "data.py"
_spec = importlib.util.spec_from_file_location("mistakes_data", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_data"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

pytestmark = pytest.mark.slow
WRONG = [(SHARD, *row) for row in (*mistakes.WRONG_SHARD.items(), *mistakes.AGAIN_SHARD)]
WRONG += [(EVALUATE, *row) for row in (*mistakes.WRONG_EVALUATE.items(), *mistakes.AGAIN_EVALUATE)]
RIGHT = [(SHARD, *row) for row in mistakes.RIGHT_SHARD.items()]
RIGHT += [(EVALUATE, *row) for row in mistakes.RIGHT_EVALUATE.items()]
ids = [f"{spec.function}-{name}-{k}" for k, (spec, name, _) in enumerate(WRONG)]


@pytest.mark.parametrize(("spec", "name", "answer"), WRONG, ids=ids)
def test_wrong_answer_is_named(spec, name, answer):
    with pytest.raises(check.CheckFailed) as caught:
        judge(spec, answer)
    assert caught.value.mistake == name, str(caught.value)
    assert "in_rank.py" not in str(caught.value)


@pytest.mark.parametrize(("spec", "name"), [row[:2] for row in RIGHT])
def test_right_answers_pass(spec, name):
    answer = next(answer for *row, answer in RIGHT if row == [spec, name])
    verdict = judge(spec, answer, seed=len(name))
    assert verdict.points == spec.points and f"The checks passed: {spec.points} points." in repr(verdict)


def test_the_public_names_judge_the_same():
    for function, name in ((check.shard, "pads"), (check.evaluate, "mode_not_restored")):
        wrong = {**mistakes.WRONG_SHARD, **mistakes.WRONG_EVALUATE}[name]
        with pytest.raises(check.CheckFailed) as caught:
            function(wrong)
        assert caught.value.mistake == name


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SHARD.mistakes} == set(mistakes.WRONG_SHARD) - {"stub"}
    assert {mistake.name for mistake in EVALUATE.mistakes} == set(mistakes.WRONG_EVALUATE) - {"stub"}


def test_the_oracle_is_a_sum_by_hand():
    """Without torch's functions: softmax and BatchNorm as formulas, sample by sample."""
    seed = 12345
    images, labels = data_evaluate.samples_of(seed, 13)
    parts = data_evaluate.network(seed, 0).state_dict()
    right, loss = 0, 0.0
    for x, y in zip(images, labels, strict=True):
        hidden = parts["0.weight"] @ x + parts["0.bias"]
        spread = (parts["1.running_var"] + 1e-5).sqrt()
        hidden = parts["1.weight"] * (hidden - parts["1.running_mean"]) / spread + parts["1.bias"]
        scores = parts["4.weight"] @ hidden.clamp(min=0) + parts["4.bias"]
        right += int(scores.tolist().index(max(scores.tolist())) == y)
        loss += (scores.exp().sum().log() - scores[y]).item()
    assert data_evaluate.oracle(seed, 13).mean() == pytest.approx((right / 13, loss / 13), rel=1e-12)


def test_wrong_averages_are_always_told_apart():
    """In what was drawn, whatever the seed: ranks alone and the mean of ranks differ from the right accuracy."""
    for seed in range(20):
        case = data_evaluate.cases(random.Random(seed))[0]
        right = data_evaluate.oracle(case.options["seed"], 13).right
        shares = [right[rank::3].mean().item() for rank in range(3)]
        assert len({right.mean().item(), sum(shares) / 3, *shares}) >= 3


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (range(3), [0, 1, 2]),
        (torch.tensor([2, 1]), [2, 1]),
        ((number for number in (1, 2)), [1, 2]),
        (torch.tensor(3), "Tensor"),
        ("012", "str"),
        (7, "int"),
        ([None], "list of something else than whole numbers"),
    ],
)
def test_indices_may_come_in_any_form(given, read):
    assert indices(given) == read
