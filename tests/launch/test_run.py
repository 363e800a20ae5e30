"""`run` from a program: values, output, messages, and what it says when something is wrong."""

import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from course_lib import run
from course_lib.launch import Message, RunError, agent, follow, program, trace
from course_lib.launch.diagnose import RankState
from course_lib.launch.hang import explain_hang
from course_lib.launch.printed import KEPT
from course_lib.launch.supervise import Supervisor, supervisor
from course_lib.launch.trace import Blocked

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test file


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test the agent has no child."""
    yield
    agent = psutil.Process(supervisor()._process.pid)
    assert agent.children(recursive=True) == []
    assert list(supervisor().folder.glob("run-*")) == []


@pytest.fixture
def impatient(monkeypatch):
    """Ranks that all sleep are a deadlock after half a second."""
    monkeypatch.setattr(follow, "_QUIET", 0.5)


def line_of(function, text):
    """Line number of the first line of `function` that contains `text`, read from the source by hand."""
    lines = Path(function.__code__.co_filename).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return next(n for n in range(start, len(lines)) if text in lines[n - 1])


def ring_step(start):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, theirs = (
        torch.full((3,), float(rank + start), dtype=torch.float64),
        torch.empty(3, dtype=torch.float64),
    )
    request = dist.isend(mine, (rank + 1) % world, tag=7)
    dist.recv(theirs, (rank - 1) % world, tag=7)
    request.wait()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    print(f"got {theirs[0].item()}")
    return theirs, total.item()


def test_values_output_and_messages(capsys):
    result = run(ring_step, 3, args=(10,))
    rings(result, 3, capsys.readouterr().out)


def rings(result, ranks, printed):
    """What ring_step(10) must have left behind."""
    for rank in range(ranks):
        before = (rank - 1) % ranks
        value, total = result.results[rank]
        assert torch.equal(value, torch.full((3,), 10.0 + before, dtype=torch.float64))
        assert total == sum(range(ranks))
        assert result.output[rank] == f"got {10.0 + before}\n"
        assert f"[rank {rank}] got {10.0 + before}\n" in printed
        mine = [m for m in result.messages if m.rank == rank]
        assert sorted((m.op, m.peer, m.nbytes, m.tag) for m in mine) == [
            ("all_reduce", None, 8, 0),
            ("isend", (rank + 1) % ranks, 24, 7),
            ("recv", before, 24, 7),
        ]
        assert all(0 <= m.start <= m.end <= result.seconds + 1 for m in mine)
        received = next(m for m in mine if m.op == "recv")
        assert received.where == f"test_run.py, line {line_of(ring_step, 'dist.recv')}"
        assert next(m for m in mine if m.op == "all_reduce").ranks == tuple(range(ranks))


def test_one_rank_alone():
    assert run(lambda: dist.get_world_size(), 1).results == [1]


def test_environment_is_torchruns():
    got = run(lambda: {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")}, 2)
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in got.results] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]


def test_sub_group_and_batched_messages_are_recorded():
    def work():
        pair = dist.new_group([1, 2])
        if dist.get_rank() in (1, 2):
            dist.broadcast(torch.ones(5), group_src=1, group=pair)
        peer = dist.get_rank() ^ 1
        if dist.get_rank() < 2:
            ops = [dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.irecv, torch.ones(4), peer)]
            [request.wait() for request in dist.batch_isend_irecv(ops)]

    messages = run(work, 3).messages
    broadcasts = [m for m in messages if m.op == "broadcast"]
    assert [(m.rank, m.peer, m.ranks, m.nbytes) for m in sorted(broadcasts, key=lambda m: m.rank)] == [
        (1, 2, (1, 2), 20),
        (2, 2, (1, 2), 20),
    ]
    assert sorted((m.rank, m.op, m.peer, m.nbytes) for m in messages if "s" in m.op and m.op[0] == "i") == [
        (0, "isend", 1, 16),
        (1, "isend", 0, 16),
    ]
    assert all(m.end is not None for m in messages)


def fails(function, ranks=2, **options) -> RunError:
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        run(function, ranks, **options)
    assert time.monotonic() - began < 40
    return caught.value


def test_error_on_one_rank_comes_first_with_its_line():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("bad sample 7")
        dist.barrier()

    error = fails(work, 3)
    text = str(error).splitlines()
    assert error.culprit == 1
    assert text[0] == "rank 1 failed: ValueError: bad sample 7"
    assert 'raise ValueError("bad sample 7")' in str(error)
    assert [line for line in text if line.startswith(("rank 0:", "rank 2:"))] == [
        f"rank {k}: waits in barrier (test_run.py, line {line_of(work, 'dist.barrier')})" for k in (0, 2)
    ]


def test_error_on_all_ranks():
    def work():
        raise KeyError("nowhere")

    assert str(fails(work)).count("KeyError: 'nowhere'") == 2


def test_sys_exit_is_an_error():
    assert "SystemExit: 3" in str(fails(lambda: sys.exit(3), 1))


def crash():
    import ctypes

    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def leave_quietly():
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


def killed():
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "words"),
    [(crash, "killed by SIGSEGV"), (leave_quietly, "before it had returned a value"), (killed, "")],
)
def test_a_rank_that_dies(function, words):
    error = fails(function)
    assert error.culprit == 1, str(error)
    assert str(error).startswith("rank 1 ") and words in str(error)


@pytest.mark.parametrize(
    ("function", "words"),
    [(leave_quietly, "before it had returned a value"), (killed, "killed by SIGKILL")],
)
def test_a_rank_that_torchrun_has_reaped_before_we_look(function, words, monkeypatch):
    monkeypatch.setattr(psutil, "STATUS_ZOMBIE", "never seen")
    error = fails(function)
    assert error.culprit == 1 and words in str(error), str(error)


def test_dead_rank_under_plain_torchrun():
    error = fails(killed, 1, start="torchrun")
    assert error.culprit == 0 and str(error).startswith("rank 0 was killed by SIGKILL"), str(error)


def test_a_program_whose_ranks_leave_without_a_word_ends(tmp_path, monkeypatch):
    """torchrun alone waits for ever for a forked rank that leaves by os._exit(0)."""
    monkeypatch.setattr(program, "_VANISHED", 3.0)
    (tmp_path / "leaves.py").write_text("import os, time\ntime.sleep(3)\nos._exit(0)\n")
    began = time.monotonic()
    line = [str(tmp_path / "leaves.py")]
    assert program.torchrun(line, ranks=2, log=tmp_path / "log", timeout=100, start="fork") == 1
    assert time.monotonic() - began < 90  # it is no timeout: that would be an error


def test_a_torchrun_that_stands_still_beside_a_dead_rank_is_ended(tmp_path, monkeypatch):
    """As it does when a rank is killed while torchrun takes its result."""
    monkeypatch.setattr(program, "_VANISHED", 3.0)
    (tmp_path / "waits.py").write_text("import os, time\nopen(f'{os.getpid()}.rank', 'w')\ntime.sleep(80)\n")

    def harm():
        for mark in list(tmp_path.glob("*.rank"))[:1] if len(list(tmp_path.glob("*.rank"))) == 2 else []:
            rank = psutil.Process(int(mark.stem))
            rank.parent().suspend()
            rank.kill()
            mark.unlink()

    line = [str(tmp_path / "waits.py")]
    code = program.torchrun(line, ranks=2, log=tmp_path / "log", cwd=tmp_path, timeout=60, start="fork", on_tick=harm)
    assert code == 1


def test_receives_that_nobody_sends(impatient):
    def work():
        if dist.get_rank() == 0:
            dist.recv(torch.ones(2), 2)

    error = fails(work, 3, timeout=60)
    line = line_of(work, "dist.recv")
    assert (
        f"rank 0 waits in recv from rank 2 (test_run.py, line {line}), but rank 2 has returned without sending "
        "anything more." in str(error)
    )
    assert error.culprit is None


def test_everybody_sends_first():
    def work():
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.send(torch.ones(10), (rank + 1) % world)
        dist.recv(torch.ones(10), (rank - 1) % world)

    error = fails(work, 4)
    assert "rank 0 → 1 → 2 → 3 → 0: everybody sends and nobody receives" in str(error)
    line = line_of(work, "dist.send")
    for rank in range(4):
        assert f"rank {rank}: waits in send to rank {(rank + 1) % 4} (test_run.py, line {line})" in str(error)
    assert [m.op for m in error.messages] == ["send"] * 4


@pytest.mark.parametrize(
    ("neighbour", "tagged", "says"),
    [
        (-1, False, "rank 0 waits for rank 2, but rank 2 sends to rank 1 (test_run.py, line "),
        (1, True, "rank 2 sends to rank 0 with tag 2 (test_run.py, line "),
    ],
)
def test_messages_that_go_astray(impatient, neighbour, tagged, says):
    def work():
        rank, box, tag = dist.get_rank(), torch.ones(3), dist.get_rank() if tagged else 0
        sending = dist.isend(torch.ones(3), (rank + neighbour) % 3, tag=tag)
        dist.recv(box, (rank - 1) % 3, tag=tag)
        sending.wait()

    text = str(fails(work, 3))
    assert "each waits for a message that does not come" in text and "nobody sends" not in text
    assert says in text


def test_a_message_that_never_left_is_named_in_a_circle():
    """An isend without its wait() may or may not leave: so the states are made here, as two ranks would leave them."""
    states = [
        RankState(rank, trace.RUNNING, Blocked("recv", 1 - rank, f"x.py, line {rank}", (), 0)) for rank in range(2)
    ]
    calls = [
        Message(rank, op, 1 - rank, 4, start, end, f"x.py, line {line}")
        for rank in range(2)
        for line, (op, start, end) in enumerate([("isend", 0.0, 0.5), ("recv", 0.1, 0.5), ("isend", 0.6, None)], 5)
    ] + [Message(rank, "recv", 1 - rank, 4, 0.7, None, f"x.py, line {rank}") for rank in range(2)]
    text = explain_hang(states, calls)
    assert "rank 1 has called isend to rank 0 (x.py, line 7) but never wait() on what isend returned" in text
    assert "nobody sends" not in text
    without = [m for m in calls if m.end is not None or m.op == "recv"]  # the second message was never begun
    assert explain_hang(states, without).endswith("everybody waits to receive and nobody sends.")


def test_a_deadlock_is_one_on_a_busy_machine_too(impatient, monkeypatch):
    """Where the ranks are never seen asleep, it is told when the time is up."""
    monkeypatch.setattr(follow.Ranks, "_starved", lambda *_: True)
    with pytest.raises(RunError, match="not finished after 2 s") as caught:
        run(lambda: dist.recv(torch.ones(1), 1 - dist.get_rank()), 2, timeout=2)
    assert caught.value.deadlock
    with pytest.raises(RunError, match="not finished after 1 s") as caught:
        run(lambda: (dist.get_rank() and dist.recv(torch.ones(1), 0)) or time.sleep(60), 2, timeout=1)
    assert not caught.value.deadlock


def test_collective_on_one_rank(impatient):
    def work():
        if dist.get_rank() == 0:
            dist.barrier()

    assert "but rank 1 has returned without calling it" in str(fails(work))


def test_different_sizes_are_named():
    def work():
        dist.all_reduce(torch.ones(25 if dist.get_rank() == 0 else 50))

    error = fails(work, 2)
    assert "rank 0 calls all_reduce with 100 bytes" in str(error)
    assert "rank 1 calls all_reduce with 200 bytes" in str(error)


def test_a_sleeping_rank_is_not_a_deadlock():
    def work():
        if dist.get_rank() == 0:
            time.sleep(4)  # longer than the time after which sleeping ranks that all wait are a deadlock
        dist.barrier()
        return "done"

    assert run(work, 2).results == ["done", "done"]


def test_hang_that_holds_the_gil():
    def work():
        import re

        if dist.get_rank() == 1:
            re.match("(a+)+$", "a" * 60 + "b")
        dist.barrier()

    error = fails(work, 2, timeout=0.5)
    line = line_of(work, "re.match")
    assert f"rank 1: was computing (test_run.py, line {line})" in str(error)


def test_ignores_sigterm():
    def work():
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.get_rank() == 1:
            raise RuntimeError("stop")
        while True:
            time.sleep(1)

    assert fails(work).culprit == 1


def test_much_output(capsys):
    def work():
        sys.stdout.write(("x" * 99 + "\n") * 600_000)  # 60 MB
        print("the end")

    result = run(work, 1)
    assert KEPT <= len(result.output[0]) < KEPT + 1000
    assert result.output[0].endswith("the end\n")
    printed = capsys.readouterr().out
    assert "the rest is in .output[0] only" in printed and len(printed) < 2 << 20


def test_large_result():
    def work():
        return torch.arange(20_000_000, dtype=torch.int32)  # 80 MB

    value = run(work, 1).results[0]
    assert value.numel() == 20_000_000 and int(value[-1]) == 19_999_999


def test_grandchild_ends_with_the_run():
    def work():
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    for pid in run(work, 2).results:
        assert not psutil.pid_exists(pid)


@functools.lru_cache(maxsize=4)
def remembered(number: int) -> int:
    return number * dist.get_rank()


def test_a_function_that_remembers_its_values_is_sent():
    """cloudpickle only writes down its name, and a rank has no module in which this stands."""
    assert run(lambda: [remembered(3), remembered(3), remembered.cache_info()[:3]], ranks=2).results == [
        [0, 0, (1, 1, 4)],
        [3, 3, (1, 1, 4)],
    ]
    assert run(lambda: functools.cache(len)("four"), ranks=1).results == [4]


def test_loader_workers_leave_no_folder():
    """They open sockets in a folder that multiprocessing makes, and are killed with their rank."""

    def loads() -> int:
        torch.batches = iter(torch.utils.data.DataLoader(torch.arange(60), batch_size=2, num_workers=2))
        return int(next(torch.batches).sum())

    before = sorted(Path(tempfile.gettempdir()).glob("pymp-*"))
    assert run(loads, ranks=2).results == [1, 1]
    assert sorted(Path(tempfile.gettempdir()).glob("pymp-*")) == before


def test_two_runs_at_once_are_refused_or_wait():
    answers = []

    def call():
        try:
            answers.append(run(lambda: time.sleep(2), 2, quiet=True).ranks)
        except RuntimeError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert 2 in answers
    assert all(a == 2 or "Another run" in a for a in answers)


def test_many_runs_in_a_row():
    descriptors = psutil.Process().num_fds()
    for k in range(20):
        assert run(lambda k: k, 1, args=(k,), quiet=True).results == [k]
    assert psutil.Process().num_fds() <= descriptors + 2


def test_agent_killed_within_and_between_runs():
    assert run(dist.get_rank, 2).results == [0, 1]
    threading.Timer(2.0, lambda pid: os.kill(pid, 9), args=(supervisor()._process.pid,)).start()

    def work():
        subprocess.Popen(["sleep", "1001"], start_new_session=True)
        time.sleep(100)

    with pytest.raises(RuntimeError, match="killed from outside"):
        run(work, 2)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1001"]]
    assert run(dist.get_rank, 2, start="direct").results == [0, 1]  # for which an agent is ready in half the time
    supervisor()._process.kill()
    supervisor()._process.wait()
    assert run(dist.get_rank, 2).results == [0, 1]


LOCK = threading.Lock()


def uses_lock():
    return LOCK.locked()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"fn": uses_lock}, TypeError, "uses_lock uses the variable 'LOCK', a lock"),
        ({"fn": print, "args": (LOCK,)}, TypeError, r"args\[0\] is a lock"),
        ({"fn": 3}, TypeError, "needs a function"),
        ({"fn": print, "ranks": 0}, ValueError, "at least one rank"),
        ({"fn": print, "ranks": 2.0}, TypeError, "whole number"),
        ({"fn": print, "ranks": 1_000_000}, ValueError, "MB are free: at most"),
        ({"fn": print, "args": 3}, TypeError, "args must be a tuple"),
        ({"fn": print, "timeout": 0}, ValueError, "positive number of seconds"),
        ({"fn": print, "timeout": "5"}, TypeError, "number of seconds"),
        ({"fn": print, "timeout": float("inf")}, ValueError, "at most a million"),
        ({"fn": print, "backend": "mpi"}, ValueError, "choose 'gloo'"),
        ({"fn": print, "start": "spawn"}, ValueError, "choose 'auto'"),
    ],
)
def test_bad_arguments(arguments, kind, words):
    with pytest.raises(kind, match=words):
        run(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_gpu():
    with pytest.raises(ValueError, match="needs NVIDIA GPUs"):
        run(print, backend="nccl")


def test_value_that_cannot_come_back():
    error = fails(lambda: (k for k in range(3)), 2)
    assert "returned a generator, which cannot be sent back" in str(error)


def test_error_can_be_pickled_with_its_text():
    assert "stop" in str(pickle.loads(pickle.dumps(RunError("stop"))))


@pytest.mark.parametrize(("start", "ranks", "nodes"), [("torchrun", 2, 1), ("fork", 4, 2)])
def test_plain_torchrun_and_two_torchruns_as_two_nodes(tmp_path, monkeypatch, capsys, start, ranks, nodes):
    """Each has its own local ranks; and a module that only our own path knows is found."""
    name = f"beside_{start}"
    (tmp_path / f"{name}.py").write_text("def answer():\n    return 42\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    beside = importlib.import_module(name)

    def work():
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return ring_step(10), [int(os.environ[name]) for name in names], beside.answer()

    result = run(work, ranks, nodes=nodes, start=start)
    each = ranks // nodes
    assert [value[1:] for value in result.results] == [
        ([r, r % each, r // each, ranks, each], 42) for r in range(ranks)
    ]
    result.results = [value[0] for value in result.results]
    rings(result, ranks, capsys.readouterr().out)


def test_failure_on_the_second_node():
    assert fails(leave_quietly, 2, nodes=2).culprit == 1
    with pytest.raises(ValueError, match="3 ranks do not spread evenly over nodes=2"):
        run(print, 3, nodes=2)


def test_a_rank_that_is_not_there():
    def send():
        dist.send(torch.ones(1), dist.get_rank() + 1)

    def receive():
        dist.recv(torch.ones(1), dist.get_rank() - 1)

    assert "rank 1 sends to rank 2, but the ranks are 0 to 1" in str(fails(send, 2))
    assert "rank 0 receives from rank -1, but the ranks are 0 to 1" in str(fails(receive, 2))


from torch.distributed import all_reduce, isend  # noqa: E402 - imported by name, as a cell may do


def test_functions_imported_by_name_are_recorded():
    def work():
        all_reduce(torch.ones(2))
        peer = dist.get_rank() ^ 1
        ops = [dist.P2POp(isend, torch.ones(4), peer), dist.P2POp(dist.irecv, torch.ones(4), peer)]
        [request.wait() for request in dist.batch_isend_irecv(ops)]

    assert sorted(m.op for m in run(work, 2).messages) == ["all_reduce"] * 2 + ["irecv"] * 2 + ["isend"] * 2


def test_every_collective_of_torch_is_watched():
    import inspect

    from torch.distributed import distributed_c10d

    from course_lib.launch.trace import OPS

    quiet = ("init", "destroy", "new_", "get_", "set_", "split_", "shrink_")  # they move no tensor
    found = {
        name
        for name in distributed_c10d.__all__
        if inspect.isfunction(function := getattr(distributed_c10d, name)) and not name.startswith(quiet)
        if "group" in inspect.signature(function).parameters
    }
    assert found - set(OPS) == set()


def test_isend_without_wait_is_named(impatient):
    def work():
        if dist.get_rank() == 0:
            dist.isend(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)

    try:
        run(work, 2)  # it may get through
    except RunError as error:
        assert "rank 0 has called isend to rank 1" in str(error), str(error)


def test_path_objects_in_sys_path(monkeypatch, tmp_path):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert run(lambda: 1, 1).results == [1]
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    import beside

    assert run(beside.answer, 1).results == [42]


def test_causes_and_long_tracebacks():
    def outer():
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    def endless():
        return endless()

    class Mute(Exception):
        def __str__(self):
            raise TypeError

    def mute():
        raise Mute

    assert "caused by KeyError: 'key'" in str(fails(outer, 1))
    text = str(fails(endless, 1))
    assert "RecursionError" in text and " more …" in text and len(text) < 5000
    assert "Mute: (its __str__ raised TypeError)" in str(fails(mute, 1))


def test_own_error_that_sounds_like_the_network_is_the_culprit():
    def work():
        if dist.get_rank() == 1:
            raise RuntimeError("Read error in my own file parser")
        dist.barrier()

    assert fails(work, 2).culprit == 1


def test_run_within_a_rank_is_refused():
    def work():
        from course_lib import run

        run(print, 1)

    assert "inside a rank of another run()" in str(fails(work, 1))


def test_an_agent_whose_kernel_is_gone_takes_its_folder_with_it():
    own = Supervisor(warm=False)
    assert own.folder.exists()
    own._channel.close()  # all that a killed kernel does
    assert own._process.wait(30) == 0
    assert not own.folder.exists()
    own.close()


def test_the_agent_s_shortcuts_give_what_torch_s_own_ways_give():
    """Two calls of torch that look through all modules, or all packages, in each fork."""

    def event(name):
        return name()

    def named(name):
        return event(name)

    torch_s_own = dynamic_rendezvous.get_method_name
    assert named(agent._caller) == named(torch_s_own) == "named"

    def programs():
        return sorted(metadata.entry_points(group="console_scripts").names)

    assert run(programs, ranks=1).results == [programs()]
