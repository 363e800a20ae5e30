"""Exercise 10: each wrong answer gets its own verdict, no right one is refused.

Answers that come back share one start of ranks; those that end badly, and the solutions, go the whole way.
"""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import check, run
from course_lib.check import engine
from course_lib.check.group import Evidence, RankAnswer
from course_lib.check.specs import surviving_train_judge
from course_lib.check.specs.surviving_checkpoints_mistakes import SPEC as CHECKPOINTS
from course_lib.check.specs.surviving_train_mistakes import SPEC as TRAIN

_path = Path(__file__).parents[1] / "mistakes" / "surviving.py"
_spec = importlib.util.spec_from_file_location("mistakes_surviving", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_surviving"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

pytestmark = pytest.mark.slow
ALONE = {"stub", "destroys_group", "one_rank_in_a_collective"}  # these end badly, so each needs ranks of its own
WRONG = [(CHECKPOINTS, *row) for row in (*mistakes.WRONG_CHECKPOINTS.items(), *mistakes.AGAIN_CHECKPOINTS)]
WRONG += [(TRAIN, *row) for row in (*mistakes.WRONG_TRAIN.items(), *mistakes.AGAIN_TRAIN)]
RIGHT = [(CHECKPOINTS, *row) for row in mistakes.RIGHT_CHECKPOINTS.items()]
RIGHT += [(TRAIN, *row) for row in mistakes.RIGHT_TRAIN.items()]
TOGETHER = [row for row in WRONG + RIGHT if row[1] not in ALONE]


def drive_all(todo):
    """In a rank: what the driver notes of each answer."""
    return [drive(fn, inputs[dist.get_rank()], **options) for fn, drive, inputs, options in todo]


@pytest.fixture(scope="module")
def seen():
    """The evidence of all answers that come back, from one start of two ranks and one of three."""
    found = [Evidence(spec.cases(random.Random(k))) for k, (spec, _, _) in enumerate(TOGETHER)]
    for world in (2, 3):
        chosen = [k for k, evidence in enumerate(found) if evidence.cases[0].world == world]
        cases = [found[k].cases[0] for k in chosen]
        todo = [(TOGETHER[k][2], c.drive, c.inputs, c.options) for k, c in zip(chosen, cases, strict=True)]
        ranks = run(drive_all, world, args=(todo,), quiet=True, watch=False, timeout=200).results
        for at, k in enumerate(chosen):
            told = [rank[at] for rank in ranks]
            found[k].answers[0] = [RankAnswer(torch.empty(0), facts=facts, tensors=tensors) for facts, tensors in told]
    return found


ids = [f"{spec.function}-{name}-{k}" for k, (spec, name, _) in enumerate(TOGETHER)]


@pytest.mark.parametrize("k", range(len(TOGETHER)), ids=ids)
def test_what_came_back_is_named_or_passes(seen, k):
    spec, name, _ = TOGETHER[k]
    wrong = spec.compare(seen[k])
    if TOGETHER[k] in RIGHT:
        assert wrong is None, wrong.text
        assert len(spec.praise(seen[k])) >= 3
        return
    known, text = engine._named(spec, seen[k], wrong) or (None, "")
    assert known and known.name == name, f"{known} {wrong} {text}"


ENDS = [row for row in WRONG if row[1] in ALONE]


@pytest.mark.parametrize(("spec", "name", "answer"), ENDS, ids=[f"{row[0].function}-{row[1]}" for row in ENDS])
def test_what_ends_badly_is_named(spec, name, answer):
    with pytest.raises(check.CheckFailed) as caught:
        engine.judge(spec, answer)
    assert caught.value.mistake == name, str(caught.value)
    assert "in_rank.py" not in str(caught.value)


def test_the_public_names_judge_the_same(tmp_path):
    left = set(tmp_path.parent.glob("kills-*"))
    assert "The checks passed: 6 points." in repr(check.checkpoints(mistakes.Right))
    assert "The checks passed: 6 points." in repr(check.train(mistakes.RIGHT_TRAIN["as the solution"]))
    for function, answer, name in (
        (check.checkpoints, mistakes.NoFsync, "no_fsync"),
        (check.train, mistakes.WRONG_TRAIN["forgets_optimizer"], "forgets_optimizer"),
    ):
        with pytest.raises(check.CheckFailed) as caught:
            function(answer)
        assert caught.value.mistake == name
    assert set(tmp_path.parent.glob("kills-*")) == left


@pytest.mark.parametrize("spec", [CHECKPOINTS, TRAIN], ids=["Checkpoints", "train"])
def test_every_named_mistake_has_an_example(spec):
    assert {mistake.name for mistake in spec.mistakes} == {name for of, name, _ in WRONG if of is spec} - {"stub"}


def test_kills_come_at_every_point(seen):
    """The solution's save: opened, half written, written, fsynced, renamed, and the old one removed."""
    at = next(k for k, row in enumerate(TOGETHER) if row[2] is mistakes.Right)
    trials = seen[at].answers[0][1].facts["trials"]
    told = [trial["told"].partition(" before ")[2] for trial in trials if trial["kind"] == "kill"]
    expected = {
        "unfinished is written",
        "the rest of unfinished is written",
        "anything comes after unfinished is written",
    }
    assert set(told) > expected
    found = {text for text in told if text not in expected}
    assert any(text.startswith("remove of step_0000") for text in found), found


def test_the_oracle_is_plain_torch(seen):
    """The formula of BatchNorm in the oracle is torch's; the two trainings differ in nothing else."""
    module = surviving_train_judge.network(3)
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.nn.init.uniform_(module[1].weight)
    assert torch.allclose(surviving_train_judge._normed(module, x), module[1](x), rtol=1e-12)
