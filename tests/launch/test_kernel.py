"""`run` in real kernels: the cell's own line, interrupts, restarts and deaths; and nothing left behind."""

import re
import time

SLEEP = "def work():\n    print('begun')\n    import time; time.sleep(300)\n"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_values_and_prefixed_output(kernel):
    done = kernel.run(
        "def work():\n    x = torch.tensor([dist.get_rank()])\n    dist.all_reduce(x)\n    print('sum', x.item())\n"
        "    return x.item()\nrun(work, ranks=3).results"
    )
    assert done["error"] is None
    assert sorted(done["text"].replace("[6, 6", "").splitlines()[:3]) == [f"[rank {k}] sum 3" for k in range(3)]
    assert "[3, 3, 3]" in done["text"]
    assert kernel.none_left(agent=True) == []


def test_error_names_cell_and_line(kernel):
    done = kernel.run(
        "def work():\n    if dist.get_rank() == 1:\n        raise ValueError('bad sample')\n    dist.barrier()\n"
        "run(work, 2)"
    )
    text = plain(done["error"])
    assert re.search(r"rank 1 failed: ValueError: bad sample\n\n  Cell In\[\d+\], line 3, in work\n", text)
    assert re.search(r"rank 0: waits in barrier \(Cell In\[\d+\], line 4\)", text)
    assert "course_lib/launch" not in text  # our own frames say nothing to the learner
    assert kernel.none_left(agent=True) == []


def test_interrupt_once_then_three_times_then_go_on(kernel):
    for times in (1, 3):
        request = kernel.start(SLEEP + "run(work, 3)")
        kernel.wait_for_text("begun")
        for _ in range(times):
            kernel.interrupt()
            time.sleep(0.05)
        began = time.monotonic()
        done = kernel.finish(request)
        assert done["error"] is not None and time.monotonic() - began < 10
        assert kernel.none_left(agent=True) == []
    text = plain(kernel.run("run(lambda: dist.get_rank() + 5, 2).results")["text"])
    assert "[5, 6]" in text


def test_interrupt_says_where_the_ranks_were(kernel):
    request = kernel.start(SLEEP + "run(work, 2)")
    kernel.wait_for_text("begun")
    time.sleep(0.3)
    kernel.interrupt()
    text = plain(kernel.finish(request)["error"])
    assert re.search(r"rank 1 was computing \(Cell In\[\d+\], line 3\)", text), text


# What follows happens to `other`, one after the other: each agent costs ten times what a run does.


def test_two_notebooks_at_once(kernel, other):
    code = "import torch.distributed as dist\nfrom course_lib import run\n"
    code += "def work():\n    import time; time.sleep(1); dist.barrier(); return dist.get_rank()\nrun(work, 3).results"
    requests = [k.start(code) for k in (kernel, other)]
    for k, request in zip((kernel, other), requests, strict=True):
        assert "[0, 1, 2]" in k.finish(request)["text"]


def test_agent_killed_in_the_middle(other):
    request = begin(other, ranks=2)
    agent = next(p for p in other.processes() if "course_lib.launch.agent" in p.cmdline())
    agent.kill()
    assert "killed from outside" in plain(other.finish(request)["error"])
    assert other.none_left() == []
    assert "[0]" in other.run("import torch.distributed as dist\nrun(dist.get_rank, 1).results")["text"]


def begin(kernel, ranks: int) -> str:
    """Start a run of ranks that sleep, and wait until they do."""
    kernel.run("from course_lib import run")
    request = kernel.start(SLEEP + f"run(work, {ranks})")
    kernel.wait_for_text("begun")
    assert len(kernel.processes()) >= ranks + 2  # agent, torchrun, the ranks
    return request


def test_kernel_restarts_in_the_middle_of_a_run(other):
    begin(other, ranks=3)
    other.manager.restart_kernel(now=False)
    other.client.wait_for_ready(timeout=60)
    code = "import torch.distributed as dist\nfrom course_lib import run\nrun(dist.get_rank, 2).results"
    assert "[0, 1]" in other.run(code)["text"]
    assert other.none_left(agent=True) == []


def test_kernel_is_killed_in_the_middle_of_a_run(other):
    begin(other, ranks=3)
    other.manager.shutdown_kernel(now=True)
    assert other.none_left() == []
