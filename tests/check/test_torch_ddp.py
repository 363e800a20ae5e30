"""Exercise 07: each wrong answer gets its own verdict, and no right one is refused.

Most answers share one start of three ranks; those that end badly, and a few right ones, go the whole way.
"""

import importlib.util
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import check, run
from course_lib.check import engine
from course_lib.check.group import Evidence, RankAnswer
from course_lib.check.specs import torch_ddp_accumulate, torch_ddp_onebit
from course_lib.check.together import collect

_path = Path(__file__).parents[1] / "mistakes" / "torch_ddp.py"
_spec = importlib.util.spec_from_file_location("mistakes_torch_ddp", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_torch_ddp"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file

pytestmark = pytest.mark.slow
ACCUMULATE, HOOK = torch_ddp_accumulate.SPEC, torch_ddp_onebit.SPEC
WRONG = [(ACCUMULATE, *row) for row in (*mistakes.ACCUMULATE_WRONG.items(), *mistakes.ACCUMULATE_AGAIN)]
WRONG += [(HOOK, *row) for row in (*mistakes.HOOK_WRONG.items(), *mistakes.HOOK_AGAIN)]
RIGHT = [(ACCUMULATE, *row) for row in mistakes.ACCUMULATE_RIGHT.items()]
RIGHT += [(HOOK, *row) for row in mistakes.HOOK_RIGHT.items()]
END_BADLY = {"stub", "skips_empty_microbatch", "returns_no_future", "future_of_no_tensor", "waits_in_decode"}
TOGETHER = [row for row in WRONG + RIGHT if row[1] not in END_BADLY | {"waits_in_hook"}]
# Wrong answers that the case for most does not show, or whose name rests on two cases.
MORE = {"clips", "sends_for_each_microbatch", "residual_overwritten", "kept_elsewhere"}
FOR_MOST = {"accumulate": "uneven", "onebit_hook": "one"}
SENTENCES = {
    "forgets_world_size": "multiply the loss by it",
    "mean_of_means": r"samples, update by update: rank 0: 7\+",
    "never_zeroes": "fills .grad with 0.5 .* zero_grad.. is missing",
    "all_in_one_forward": r"(\d+) samples went through the model in one forward; its longest microbatch has 7\.",
    "keeps_graphs": "the graph of 7 more was held, which had had no backward yet",
    "retains_graphs": "the graph of 7 more was held, after its backward",
    "sends_for_each_microbatch": r"rank 0 makes \d calls an update, and \d when there is 1 microbatch",
    "factor_of_0": "0 everywhere, as when a loss is multiplied by 0",
    "backwards_too_late": r"Only microbatch(es)? 0(, 1, 2)? \(of 0 to 3\) .* Call backward for each microbatch",
    "waits_at_a_barrier": r"rank 0 calls barrier \(torch_ddp.py, line \d+\)",
    "several_small_calls": "rank 0 makes (10|4) calls beside the gradients, and 2 would do: (10|2) times all_reduce of",
    "read_too_early": "In some step all averages are 0|A number like nan",
    "clips": "the length (5|0.001) instead of|What is larger than 0.5 was cut off",
    "lower_precision": "rounding to (float32|float16 or bfloat16)",
    "kept_elsewhere": "is emptied before step 3: step 3, rank 0",
    "keyed_by_index": r"should be .* \(the parameters in the buckets of this step: \[\[0, 3, 1, 2\]\]\)",
}


def drive_all(todo):
    """In a rank: for each answer what the driver notes of each case. A barrier before each marks it in the messages."""
    told = []
    for fn, cases in todo:
        told.append([])
        for drive, inputs, options in cases:
            dist.barrier()
            told[-1].append(drive(fn, inputs[dist.get_rank()], **options))
    return told


@pytest.fixture(scope="module")
def seen() -> list[Evidence]:
    """The evidence of all answers that come back, for the cases of three ranks; most wrong ones get only one."""
    found = []
    for k, row in enumerate(TOGETHER):
        three = [case for case in row[0].cases(random.Random(k)) if case.world == 3]
        every = row in RIGHT or row[1] in MORE
        found.append(Evidence([case for case in three if every or case.group == FOR_MOST[row[0].function]]))
    todo = [
        (answer, [(c.drive, c.inputs, c.options) for c in evidence.cases])
        for (_, _, answer), evidence in zip(TOGETHER, found, strict=True)
    ]
    result = run(drive_all, 3, args=(todo,), quiet=True)
    parts: list[list[list]] = [[] for _ in range(3)]
    for m in result.messages:
        if m.op == "barrier" and m.where.startswith(Path(__file__).name):
            parts[m.rank].append([])
        else:
            parts[m.rank][-1].append(m)
    place = 0
    for k, evidence in enumerate(found):
        for number in range(len(evidence.cases)):
            told = [rank[k][number] for rank in result.results]
            evidence.answers[number] = [RankAnswer(torch.empty(0), facts=f, tensors=t) for f, t in told]
            evidence.messages[number] = [m for of_rank in parts for m in of_rank[place]]
            place += 1
    return found


def ids(rows):
    return [f"{spec.function}-{name}" for spec, name, _ in rows]


@pytest.mark.parametrize("k", range(len(TOGETHER)), ids=ids(TOGETHER))
def test_what_came_back_is_named_or_passes(seen, k):
    spec, name, _ = TOGETHER[k]
    wrong = spec.compare(seen[k])
    if (row := TOGETHER[k]) in RIGHT:
        assert wrong is None, f"{row[1]}: {wrong.text}"
        return
    known, text = engine._named(spec, seen[k], wrong)
    assert known.name == name, f"{wrong.text} {text}"
    assert re.search(SENTENCES.get(name, ""), f"{wrong.text} {text}"), f"{wrong.text} {text}"


@pytest.mark.parametrize(("spec", "name", "answer"), [row for row in WRONG if row[1] in END_BADLY],
                         ids=ids([row for row in WRONG if row[1] in END_BADLY]))  # fmt: skip
def test_what_ends_badly_is_named(spec, name, answer):
    with pytest.raises(check.CheckFailed) as caught:
        engine.judge(spec, answer)
    assert caught.value.mistake == name, str(caught.value)
    if name == "skips_empty_microbatch":
        text = str(caught.value)
        assert "rank 0: 4+3 and 2+1, rank 1: 5+0 and 0+0" in text and "rank 1 has a microbatch without samples" in text
        assert "rank 1 has finished this case." in text and "rank 2" not in text


def test_a_hook_with_other_names_is_told_what_ddp_asks_for():
    with pytest.raises(check.CheckFailed, match="parameters are called s and b; DDP asks for one called bucket"):
        engine.judge(HOOK, mistakes.other_names)
    with pytest.raises(KeyError, match="bucket"):  # torch's own way to say it
        torch.nn.parallel.DistributedDataParallel._check_comm_hook(None, mistakes.other_names)


def _late(answer, patience) -> Evidence:
    """The case with a patient rank, alone."""
    case = next(case for case in torch_ddp_onebit.cases(random.Random(1)) if "patient" in case.options)
    e = Evidence([replace(case, options=case.options | {"patience": patience})])
    collect(answer, e, [0], 20.0)
    assert not e.broken, e.broken
    return e


def test_a_hook_that_waits_for_others_in_some_steps_is_named():
    e = _late(mistakes.HOOK_WRONG["waits_in_hook"], 0.3)
    wrong = HOOK.compare(e)
    known, text = engine._named(HOOK, e, wrong)
    assert known.name == "waits_in_hook" and "decode is called when" in text
    late = e.cases[0].options["patient"]
    assert (
        f"later than rank {1 - late}, whose hook returned only then: it waits for the end of all_gather" in wrong.text
    )


@pytest.mark.parametrize(("hooks", "waits"), [([[1.0, 6.5]], True), ([[1.0, 1.1], [1.2, 6.5]], True),
                                              ([[1.0, 1.1]], False), ([[5.9, 6.5]], False)])  # fmt: skip
def test_only_who_was_in_a_hook_all_that_time_waits(hooks, waits):
    """Rank 1 began at 6 s. A hook that is over by then, or had only begun, as on a busy machine, is no fault."""
    case = next(case for case in torch_ddp_onebit.cases(random.Random(1)) if "patient" in case.options)
    case = replace(case, options=case.options | {"patient": 1})
    answers = [RankAnswer(torch.empty(0), facts={"hooks": [[[0.5, 0.6]], found], "began": [0.4, began]})
               for found, began in ((hooks, 0.9), ([[6.1, 6.6]], 6.0))]  # fmt: skip
    wrong = torch_ddp_onebit.late(Evidence([case], {0: answers}, {0: []}, zero={0: 0.0}))
    assert (wrong is not None) == waits


WHOLE = [row for row in RIGHT if row[1] in ("as the solution", "one no_sync", "another tensor")]


@pytest.mark.parametrize(("spec", "name", "answer"), WHOLE, ids=ids(WHOLE))
def test_right_answers_pass(spec, name, answer):
    verdict = getattr(check, spec.function)(answer)
    assert verdict.points == spec.points and "The checks passed" in repr(verdict)


@pytest.mark.parametrize("spec", [ACCUMULATE, HOOK], ids=["accumulate", "onebit_hook"])
def test_every_named_mistake_has_an_example(spec):
    assert {mistake.name for mistake in spec.mistakes} == {name for of, name, _ in WRONG if of is spec} - {"stub"}


def test_cases_are_fresh_and_uneven():
    for spec in (ACCUMULATE, HOOK):
        one, other = spec.cases(random.Random(1)), spec.cases(random.Random(2))
        assert not torch.equal(one[0].inputs[0], other[0].inputs[0]) and not torch.equal(*one[0].inputs[:2])
        assert [case.world for case in one] == [3, 3, 2]
    uneven, _, tail = torch_ddp_accumulate.cases(random.Random(1))
    totals = [sum(sizes[0]) for sizes in uneven.options["sizes"]]
    assert len(set(totals)) == 3 and 0 in tail.options["sizes"][1][0]
