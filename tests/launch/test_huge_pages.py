"""Memory in huge pages: what is in it stays, and the system counts as much as was moved."""

import os
import sys
import time
from pathlib import Path

import pytest

from course_lib import launch
from course_lib.launch import huge_pages
from course_lib.launch.supervise import supervisor

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")


def counted() -> int:
    """Bytes of this process's own memory that the system has in huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def in_a_child(fn):
    """What `fn` returns, in a fork, which throws away what it does to its memory."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, repr(fn()).encode())
        os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with os.fdopen(reader) as answer:
        return eval(answer.read())


def test_what_is_moved_is_the_same_and_is_counted():
    kept = [str(number) for number in range(1_000_000)]  # 80 MB in many small objects

    def moved():
        before = counted()
        return sum(huge_pages.huge_pages()), counted() - before, kept == [str(number) for number in range(1_000_000)]

    said, found, same = in_a_child(moved)
    assert same
    if not said:
        pytest.skip("this system gives no huge pages")
    # Some may have been huge before, and an end of the list above may get one by itself.
    assert 0 <= said - found < said / 2 or found >= said


def test_where_the_system_has_none_nothing_happens(monkeypatch, tmp_path):
    monkeypatch.setattr(huge_pages, "_SIZE", tmp_path / "no such file")
    assert list(huge_pages.huge_pages()) == []
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert list(huge_pages.huge_pages()) == []


def test_a_refusal_is_no_error(monkeypatch):
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 12345)
    assert list(huge_pages.huge_pages()) == []


def test_an_agent_that_is_used_often_becomes_cheap_to_fork():
    """Between two runs it puts its memory into huge pages, when the system gives them."""
    if not in_a_child(lambda: sum(huge_pages.huge_pages())):
        pytest.skip("this system gives no huge pages")
    for _ in range(8):
        launch.run(os.getppid, ranks=1, quiet=True)
    rollup, found, end = Path(f"/proc/{supervisor().agent}/smaps_rollup"), [0.0], time.monotonic() + 20
    while found[-1] < 0.7 and time.monotonic() < end:
        time.sleep(0.1)
        sizes = {line.split()[0]: int(line.split()[1]) for line in rollup.read_text().splitlines()[1:]}
        found.append(sizes["AnonHugePages:"] / sizes["Anonymous:"])
    assert found[-1] >= 0.7, found
