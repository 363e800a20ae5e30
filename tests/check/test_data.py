"""Exercise 08: each wrong answer gets its own verdict, no right one is refused, and the oracle is right."""

import importlib.util
import random
import re
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import check, run
from course_lib.check import engine
from course_lib.check.group import Evidence, RankAnswer
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
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

pytestmark = pytest.mark.slow
ALONE = {"stub", "destroys_group", "asks_others", "unequal_gather", "not_in_eval_mode"}  # these end badly,
ALONE |= {"wrapper_called", "leaves_early", "one_rank_calls"}  # so each needs ranks of its own
WRONG = [(SHARD, *row) for row in (*mistakes.WRONG_SHARD.items(), *mistakes.AGAIN_SHARD)]
WRONG += [(EVALUATE, *row) for row in (*mistakes.WRONG_EVALUATE.items(), *mistakes.AGAIN_EVALUATE)]
RIGHT = [(SHARD, *row) for row in mistakes.RIGHT_SHARD.items()]
RIGHT += [(EVALUATE, *row) for row in mistakes.RIGHT_EVALUATE.items()]
OTHER = [(SHARD, text, answer) for answer, text in mistakes.UNNAMED_SHARD.values()]
OTHER += [(EVALUATE, text, answer) for answer, text in mistakes.UNNAMED_EVALUATE.values()]
TOGETHER = [row for row in WRONG + OTHER + RIGHT if row[1] not in ALONE]
MORE = {"empty_share", "sums_each_batch", "sends_every_sample"}  # the first case alone does not show these


def drive_all(todo):
    """In a rank: for each answer what the driver notes of each case, or the type of the error that ends it."""
    told = []
    for fn, steps in todo:
        told.append([])
        for drive, inputs, options in steps:
            dist.barrier()  # marks the step in the messages
            try:
                told[-1].append((drive(fn, inputs[dist.get_rank()], **options)[0], ""))
            except ZeroDivisionError:  # on all ranks alike, after the last message
                told[-1].append(({}, "ZeroDivisionError"))
                break
    return told


@pytest.fixture(scope="module")
def seen():
    """The evidence of all answers that come back, from three ranks that were started once.

    Most wrong ones get only the first case. Three sets of cases do for all: to make one takes as long as to run it.
    """
    sets = {spec.function: [spec.cases(random.Random(k)) for k in range(3)] for spec in (SHARD, EVALUATE)}
    found = []
    for k, row in enumerate(TOGETHER):
        made = sets[row[0].function][k % 3]
        found.append(Evidence(made[:1] if row in WRONG and row[1] not in MORE else made))
    todo = [
        (answer, [(c.drive, c.inputs, c.options) for c in evidence.cases])
        for (_, _, answer), evidence in zip(TOGETHER, found, strict=True)
    ]
    result = run(drive_all, 3, args=(todo,), quiet=True)
    parts = [[] for _ in range(3)]
    for m in result.messages:
        if m.op == "barrier" and m.where.startswith(Path(__file__).name):
            parts[m.rank].append([])
        else:
            parts[m.rank][-1].append(m)
    place = 0
    for k, evidence in enumerate(found):
        for number in range(len(result.results[0][k])):
            told = [rank[k][number] for rank in result.results]
            evidence.answers[number] = [RankAnswer(torch.empty(0), facts=fact, error=error) for fact, error in told]
            evidence.messages[number] = [m for of_rank in parts for m in of_rank[place]]
            place += 1
    return found


ids = [f"{spec.function}-{name}-{k}" for k, (spec, name, _) in enumerate(TOGETHER)]


@pytest.mark.parametrize("k", range(len(TOGETHER)), ids=ids)
def test_what_came_back_is_named_or_passes(seen, k):
    spec, name, _ = TOGETHER[k]
    wrong = spec.compare(seen[k])
    if name in spec_names(spec):
        known, text = engine._named(spec, seen[k], wrong)
        assert known.name == name, f"{wrong.text} {text}"
    elif TOGETHER[k] in OTHER:
        assert name in wrong.text
        assert engine._named(spec, seen[k], wrong) is None
    else:
        assert wrong is None, wrong.text
        assert len(spec.praise(seen[k])) == (3 if spec is SHARD else 4)


def spec_names(spec):
    return {mistake.name for mistake in spec.mistakes}


ENDS = [(spec, name, answer) for spec, name, answer in WRONG if name in ALONE]


@pytest.mark.parametrize(("spec", "name", "answer"), ENDS, ids=[f"{row[1]}-{k}" for k, row in enumerate(ENDS)])
def test_what_ends_badly_is_named(spec, name, answer):
    with pytest.raises(check.CheckFailed) as caught:
        engine.judge(spec, answer)
    assert caught.value.mistake == name, str(caught.value)
    assert "in_rank.py" not in str(caught.value)


def test_an_exception_says_in_which_call():
    with pytest.raises(check.CheckFailed) as caught:
        check.shard(mistakes.first_of_none)
    call = r"shard\(seed=\d+, epoch=\d+, samples=[02], rank=[012], world_size=[23]\)"
    text = rf"{call} raised IndexError: list index out of range\n  raised at data.py, line \d+$"
    assert re.match(text, str(caught.value)), str(caught.value)


def test_the_public_names_judge_the_same():
    verdict = check.shard(mistakes.RIGHT_SHARD["as the solution"])
    assert "The checks passed: 5 points." in repr(verdict)
    verdict = check.evaluate(mistakes.RIGHT_EVALUATE["as the solution"])
    assert "The checks passed: 6 points." in repr(verdict)
    for function, name in ((check.shard, "pads"), (check.evaluate, "mode_not_restored")):
        wrong = {**mistakes.WRONG_SHARD, **mistakes.WRONG_EVALUATE}[name]
        with pytest.raises(check.CheckFailed) as caught:
            function(wrong)
        assert caught.value.mistake == name


def test_every_named_mistake_has_an_example():
    assert spec_names(SHARD) == set(mistakes.WRONG_SHARD) - {"stub"}
    assert spec_names(EVALUATE) == set(mistakes.WRONG_EVALUATE) - {"stub"}


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
    for seed in range(5):
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
        ([None], "list, and not of whole numbers"),
    ],
)
def test_indices_may_come_in_any_form(given, read):
    assert indices(given) == read
