"""The runner: what crosses from the ranks, and that answers before a failure are kept."""

import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import check
from course_lib.check import plain
from course_lib.check.findings import told_apart
from course_lib.check.group import Evidence, GroupCase
from course_lib.check.together import collect

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def case(world: int, **more) -> GroupCase:
    inputs = tuple(torch.full((4,), float(rank), dtype=torch.float64) for rank in range(world))
    return GroupCase("g", f"{world} ranks", inputs, inputs, **more)


def seen(fn, *cases: GroupCase) -> Evidence:
    evidence = Evidence(list(cases))
    collect(fn, evidence, range(len(cases)), 20)
    return evidence


def to_the_right(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor
    buffer = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % size)
    dist.irecv(buffer, (rank - 1) % size).wait()
    sending.wait()
    return buffer


def test_one_start_serves_all_world_sizes():
    e = seen(to_the_right, case(4), case(4, traced=True, late=2), case(3), case(2), case(1))
    assert e.numbers() == [0, 1, 2, 3, 4] and not e.broken
    for number, world in enumerate((4, 4, 3, 2)):
        values = [answer.value.tolist() for answer in e.answers[number]]
        assert values == [[float((rank - 1) % world)] * 4 for rank in range(world)]
        sends = [(m.rank, m.peer, m.nbytes) for rank in range(world) for m in e.sent(number, rank)]
        assert sends == [(rank, (rank + 1) % world, 32) for rank in range(world)]
        assert all(m.ranks == tuple(range(world)) for m in e.messages[number])
    assert e.answers[4][0].itself and e.messages[4] == []
    assert [event.kind for event in e.answers[1][0].events] == ["send", "recv"]
    assert not e.answers[0][0].events


def fails_with_three(tensor):
    if dist.get_world_size() == 3 and dist.get_rank() == 1:
        raise ZeroDivisionError("no thirds")
    return to_the_right(tensor)


def test_answers_before_a_failure_are_kept():
    e = seen(fails_with_three, case(4), case(3), case(2))
    assert e.numbers() == [0] and list(e.broken) == [1]
    assert not e.broken[1].deadlock and e.broken[1].culprit == 1
    error = e.answers[1][1]
    assert (error.error, error.error_text) == ("ZeroDivisionError", "no thirds")
    assert error.error_at.startswith("test_runner.py, line ")


def forgets_rank_0(tensor):
    if dist.get_rank() == 0:
        return tensor
    dist.recv(torch.empty_like(tensor), 0)
    return tensor


def test_a_deadlock_tells_who_waits_and_who_is_done():
    e = seen(forgets_rank_0, case(2), case(1))
    assert e.broken[0].deadlock
    assert "rank 0: has finished this case" in e.broken[0].text
    assert "rank 1: waits in recv from rank 0 (test_runner.py, line " in e.broken[0].text


@pytest.mark.parametrize(
    ("values", "told"),
    [((1.5, 2.5), ["1.5", "2.5"]), ((1 / 3, 1 / 3 + 1e-8), ["0.333333333", "0.333333343"]), ((2**60, 3), None)],
)
def test_numbers_that_differ_are_told_apart(values, told):
    assert told_apart(*values) == (told or [str(value) for value in values])


def leaves_one_open(tensor):
    result = to_the_right(tensor)
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        dist.irecv(torch.empty_like(tensor), 1)
    return result


def test_open_handles_are_numbered():
    e = seen(leaves_one_open, case(2))
    assert e.answers[0][0].open == (2,)
    assert e.calls(0, 0)[2].op == "irecv"


def odd_results(tensor):
    return [{"a": tensor}, tensor[1:], tensor.to(torch.complex64), object()][dist.get_rank()]


def test_whatever_is_returned_crosses_as_plain_data():
    answers = seen(odd_results, case(4)).answers[0]
    assert [a.returned for a in answers] == ["dict", "Tensor", "Tensor", "object"]
    assert [a.itself for a in answers] == [False, True, False, False]
    assert all(a.value is None for a in answers)


@pytest.mark.parametrize("dtype", sorted(plain.DTYPES))
def test_tensors_cross_bit_by_bit(tmp_path, dtype):
    tensors = {"a": torch.tensor([0, 1, 0, 1]).to(plain.DTYPES[dtype]).reshape(2, 2), "b": torch.empty(0, 3)}
    plain.write(tmp_path / "x", {"words": ["a\nb", 1.5, None]}, tensors)
    facts, back = plain.read(tmp_path / "x")
    assert facts == {"words": ["a\nb", 1.5, None]}
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]\n", b'{"facts": {}, "tensors": {"a": {"dtype": "float32", "shape": [3]}}}\n1234',
     b'{"facts": {}, "tensors": {"a": {"dtype": "os.system", "shape": []}}}\n'],
)  # fmt: skip
def test_a_file_that_is_no_answer(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="does not hold an answer"):
        plain.read(tmp_path / "x")


def test_a_function_that_cannot_be_sent_is_told_so():
    lock = threading.Lock()

    def shift(tensor):
        with lock:
            return tensor

    with pytest.raises(check.CheckFailed, match="shift uses the variable 'lock', a lock, which cannot be sent"):
        check.messages(shift)
