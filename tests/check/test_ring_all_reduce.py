"""Exercise 03: each wrong answer gets its own verdict, no right one is refused, and the oracle is right."""

import functools
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

from course_lib import check, run, show
from course_lib.check.engine import judge, told
from course_lib.check.group import GroupCase
from course_lib.check.specs import ring_trace
from course_lib.check.specs.ring_all_reduce import SPEC, cases

_path = Path(__file__).parents[1] / "mistakes" / "ring_all_reduce.py"
_spec = importlib.util.spec_from_file_location("mistakes_ring_all_reduce", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_ring_all_reduce"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.slow
WRONG = [*mistakes.WRONG.items(), *mistakes.AGAIN]
ROWS = {f"{k}-{name}": (name, answer) for k, (name, answer) in enumerate(WRONG)}
ROWS |= {f"right-{name}": (None, answer) for name, answer in mistakes.RIGHT.items()}
END_BADLY = {  # or may: so each has ranks of its own
    row for row, (name, _) in ROWS.items() if name in (
        "stub", "no_op", "no_modulo", "sends_first", "receives_first", "wrong_neighbour", "chunk_size_of_rank_0",
        "fewer_chunks", "buffer_dtype", "wrong_handle", "send_not_waited", "two_ranks_only", "fails_alone", "wrong_tag",
        "ends_do_not_meet", "destroys_group",
    )
}  # fmt: skip
WHOLE = {"sends_first", "two_ranks_only", "fails_alone", "wrong_neighbour"}  # of these: judged on all cases
NEEDS = {  # numbers of ranks without which a mistake does not show; 3 if it is not here
    "not_a_ring": {4}, "loses_integers": {4}, "loses_precision": {4}, "fewer_chunks": {4},
    "power_of_two_only": {4, 3, 2}, "wrong_mean": {4, 3, 2},
}  # fmt: skip
EQUAL = {  # with chunks of different lengths they end badly; to name them takes the traced case
    "wrong_chunk_reduce_scatter", "wrong_chunk_all_gather", "off_by_one_step",
}  # fmt: skip
FOUR = {  # right answers that are tried on 4 ranks, where dtypes and the shortest tensors are; the others on 3
    "recursive", "in both directions", "pipelined", "padded", "no empty messages", "divides first",
}  # fmt: skip
SENTENCES = {  # patterns for what must stand in the verdict
    "loses_precision": r"must be (\S+), and is (?!\1\.\n)[^z]*as (float32|float16) has them, but the tensor is float",
    "divides_each_step": "In chunk 0 the numbers of rank 2 were divided by 3, and those of rank 0 by 9",
    "wrong_divisor": r"With (\d) ranks the sum was divided by (?!\1)[24]\.",
    "only_reduce_scatter": r"each rank has one finished chunk \(rank 0 has chunk 1\)",
    "makes_new_tensors": r"`(chunks\[i\] \+= x|mine \+= arrived)`",
    "wrong_tag": r"rank 2 sends to rank 0 with tag 2 .* receives with tag 0",
    "ends_do_not_meet": r"rank (\d) waits for rank (\d), but rank \2 sends to rank",
}


def some_cases(row: str) -> list[GroupCase]:
    """Fresh numbers for each answer. Wrong: the cases in which it shows, and what else its name rests on."""
    (name, _), made = ROWS[row], cases(random.Random(row))
    if name:
        groups = ("even", "traced") if name in EQUAL else {case.group for case in made}
        return [case for case in made if case.world in NEEDS.get(name, {3}) and case.group in groups]
    most = 4 if row.removeprefix("right-") in FOUR else 3
    return [case for case in made if case.world in (most, 2, 1) or (case.world, case.group) == (4, "even")]


@functools.cache
def refused(answer, row: str | None = None) -> check.CheckFailed:
    """What the check says of an answer, in all cases or in those for a row."""
    with pytest.raises(check.CheckFailed) as caught:
        judge(replace(SPEC, cases=lambda rng: some_cases(row)) if row else SPEC, answer)
    return caught.value


@pytest.fixture(scope="module")
def seen(many):
    """The evidence of all answers that come to their end, from one start of ranks."""
    return many({row: (answer, some_cases(row)) for row, (_, answer) in ROWS.items() if row not in END_BADLY})


@pytest.mark.parametrize("row", ROWS)
def test_wrong_answer_is_named_and_right_ones_pass(seen, row):
    name, answer = ROWS[row]
    if row in seen and row.startswith("right"):
        wrong = SPEC.compare(seen[row])
        assert wrong is None, wrong.text
        assert len(SPEC.praise(seen[row])) == 4
        return
    found = told(SPEC, seen[row]) if row in seen else refused(answer, None if name in WHOLE else row)
    assert found.mistake == name, str(found)
    assert re.search(SENTENCES.get(name, ""), str(found)), str(found)


@pytest.mark.parametrize("name", mistakes.UNNAMED)
def test_other_wrong_answers_are_told_without_a_false_theory(name):
    answer, text, *false = mistakes.UNNAMED[name]
    found = refused(answer)
    assert found.mistake is None and text in str(found), str(found)
    assert not [theory for theory in false if theory in str(found)], str(found)


def test_every_named_mistake_has_an_example():
    assert {mistake.name for mistake in SPEC.mistakes} == set(mistakes.WRONG) - {"stub"}


def test_sentences_say_where_and_why():
    text = str(refused(mistakes.WRONG["wrong_chunk_all_gather"]))
    assert "With 4 ranks, chunk 0 of rank 0 should be the sum of ranks {0, 1, 2, 3}" in text
    assert "All-gather, step = 0: rank 0 sent chunk 0, which holds rank 0; it should send chunk 1" in text
    text = str(refused(mistakes.WRONG["sends_first"]))
    for rank in range(4):
        assert f"rank {rank}: waits in send to rank {(rank + 1) % 4} (ring_all_reduce.py, line " in text
    assert "isend" in text.splitlines()[-1]


def test_verdict_holds_the_numbers_and_messages_of_a_run():
    verdict = check.ring_all_reduce(mistakes.RIGHT["as the solution"])
    assert verdict.points == 10 and "The checks passed: 10 points." in repr(verdict)
    sends = [m for m in verdict.run.messages if m.op == "isend" and m.rank == 0]
    total = verdict.run.results[0].numel() * 4
    assert len(sends) == 6 and sum(m.nbytes for m in sends) == 6 * total // 4
    assert f"each of 4 ranks sent {6 * total // 4} = 2·3/4 · {total}" in repr(verdict)
    assert show.messages(verdict.run)


def all_reduced(inputs, op):
    tensor = inputs[dist.get_rank()].clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size() if op == "mean" else tensor


def test_the_oracle_agrees_with_torch():
    for case in cases(random.Random(3)):
        if case.world == 3:
            theirs = run(all_reduced, 3, args=(case.inputs, case.options.get("op")), start="direct").results[0]
            assert torch.allclose(theirs.double(), case.expected[0].double(), rtol=1e-6, atol=1e-6), case.story


def test_cases_are_fresh_and_cover_what_the_exercise_promises():
    one, other = cases(random.Random(1)), cases(random.Random(2))
    assert not torch.equal(one[0].inputs[0], other[0].inputs[0]) and not torch.equal(*one[0].inputs[:2])
    assert [case.world for case in one] == sorted((case.world for case in one), reverse=True)
    four = [case for case in one if case.world == 4]
    assert {0, 3} <= {case.inputs[0].numel() for case in four}
    assert {0, 1, 2} <= {case.inputs[0].numel() for case in one}
    assert {case.inputs[0].dtype for case in four} == {torch.float32, torch.float64, torch.bfloat16, torch.int64}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_traced_numbers_come_apart_again(world):
    inputs = ring_trace.digits(world)
    total = inputs[0] + 2 * inputs[world - 1]
    for place, value in enumerate(total.tolist()):
        chunk = place // ring_trace.LENGTH
        assert ring_trace.content(value, world) == {(0, chunk): 1, (world - 1, chunk): 2}
    assert ring_trace.content(float("nan"), world) is None and ring_trace.content(0.5, world) is None
    assert ring_trace.in_words({(0, 1): 1, (2, 1): 2, (1, 0): 1}, 1) == "rank 0, chunk 0 of rank 1 and rank 2 twice"
