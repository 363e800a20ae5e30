"""`run` in real kernels: the cell's own line, interrupts, restarts and deaths; and nothing left behind."""

import re
import time

# Cells leave the import of torch to the ranks, for each kernel that starts would do it anew.
TORCH = "    import torch, torch.distributed as dist\n"
RANK = "def rank():\n    import os; return int(os.environ['RANK'])\n"
TWO_RANKS = f"from course_lib import run\n{RANK}run(rank, 2, start='direct').results"
SLEEP = "def work():\n    print('begun')\n    import time; time.sleep(300)\n"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_values_and_prefixed_output(kernel):
    done = kernel.run(
        f"def work():\n{TORCH}    x = torch.tensor([dist.get_rank()])\n    dist.all_reduce(x)\n"
        "    print('sum', x.item())\n    return x.item()\nrun(work, ranks=3).results"
    )
    assert done["error"] is None
    assert sorted(done["text"].replace("[6, 6", "").splitlines()[:3]) == [f"[rank {k}] sum 3" for k in range(3)]
    assert "[3, 3, 3]" in done["text"]
    assert kernel.none_left(agent=True) == []


def test_error_names_cell_and_line(kernel):
    done = kernel.run(
        f"def work():\n{TORCH}    if dist.get_rank() == 1:\n        raise ValueError('bad sample')\n"
        "    dist.barrier()\nrun(work, 2)"
    )
    text = plain(done["error"])
    assert re.search(r"rank 1 failed: ValueError: bad sample\n\n  Cell In\[\d+\], line 4, in work\n", text)
    assert re.search(r"rank 0: waits in barrier \(Cell In\[\d+\], line 5\)", text)
    assert "course_lib/launch" not in text  # our own frames say nothing to the learner
    assert kernel.none_left(agent=True) == []


def test_interrupt_once_then_three_times_then_go_on(kernel):
    for times in (1, 3):
        request = kernel.start(SLEEP + "run(work, 2)")
        kernel.wait_for_text("begun")
        for _ in range(times):
            kernel.interrupt()
            time.sleep(0.05)
        began = time.monotonic()
        done = kernel.finish(request)
        assert done["error"] is not None and time.monotonic() - began < 10
        assert kernel.none_left(agent=True) == []
    text = plain(kernel.run(RANK + "run(rank, 2).results")["text"])
    assert "[0, 1]" in text


def test_interrupt_says_where_the_ranks_were(kernel):
    request = kernel.start(SLEEP + "run(work, 2)")
    kernel.wait_for_text("begun")
    time.sleep(0.3)
    kernel.interrupt()
    text = plain(kernel.finish(request)["error"])
    assert re.search(r"rank 1 was computing \(Cell In\[\d+\], line 3\)", text), text


# What follows happens to `other`, one after the other: each agent costs ten times what a run does. Those after the
# first need not learn to start a torchrun: they are ready for a direct start in half the time.


def test_two_notebooks_at_once(kernel, other):
    code = f"from course_lib import run\ndef work():\n{TORCH}    import time; time.sleep(1)\n"
    code += "    dist.barrier(); return dist.get_rank()\nrun(work, 3).results"
    requests = [k.start(code) for k in (kernel, other)]
    for k, request in zip((kernel, other), requests, strict=True):
        assert "[0, 1, 2]" in k.finish(request)["text"]


def begin(kernel, start: str) -> str:
    """Start a run of two ranks that sleep, and wait until they do."""
    kernel.run("from course_lib import run")
    request = kernel.start(SLEEP + f"run(work, 2, start={start!r})")
    kernel.wait_for_text("begun")
    assert len(kernel.processes()) >= {"fork": 4, "direct": 3}[start]  # agent, torchrun if there is one, the ranks
    return request


def test_kernel_restarts_in_the_middle_of_a_run(other):
    begin(other, "fork")
    other.manager.restart_kernel(now=False)
    other.client.wait_for_ready(timeout=60)
    assert "[0, 1]" in other.run(TWO_RANKS)["text"]
    assert other.none_left(agent=True) == []


def test_agent_killed_in_the_middle(other):
    request = begin(other, "direct")
    agent = next(p for p in other.processes() if "course_lib.launch.agent" in p.cmdline())
    agent.kill()
    assert "killed from outside" in plain(other.finish(request)["error"])
    assert other.none_left() == []
    assert "[0, 1]" in other.run(TWO_RANKS)["text"]


def test_kernel_is_killed_in_the_middle_of_a_run(other):
    begin(other, "direct")
    other.manager.shutdown_kernel(now=True)
    assert other.none_left() == []
