"""The doctor as a whole: it never hangs, hides nothing, and its exit code tells."""

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from course_lib import cli
from course_lib.cluster import all_reduce, child, doctor, probe
from course_lib.cluster.examine import Check, examine
from course_lib.cluster.finding import note, ok, problem


@pytest.fixture
def checked(monkeypatch):
    """Let the doctor run these checks instead of the real ones."""
    return lambda *checks: monkeypatch.setattr(doctor, "checks", lambda: list(checks))


def hang():
    threading.Event().wait(60)


def fail():
    raise ZeroDivisionError("by zero")


def test_one_bad_check_hides_no_other():
    checks = [
        Check("first", lambda: ok("first", "well")),
        Check("hanging", hang, limit=0.2),
        Check("failing", fail),
        Check("two", lambda: [ok("two", "a"), note("two", "b")]),
        Check("nothing", list),
    ]
    found = list(examine(checks))
    assert [(f.check, f.verdict) for f in found] == [
        ("first", "ok"), ("hanging", "problem"), ("failing", "problem"), ("two", "ok"), ("two", "note")
    ]  # fmt: skip
    assert "no answer within 0.2 s. It hangs in wait" in found[1].text
    assert "ZeroDivisionError: by zero" in found[2].text
    assert all(f.cure for f in found if f.verdict == "problem")


def test_exit_code_and_lines(checked, capsys):
    checked(Check("a", lambda: ok("a", "well")), Check("b", lambda: note("b", "look")))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "This machine is fit for the course."
    checked(Check("a", lambda: problem("a", "it is broken.", "mend it.")), Check("b", lambda: ok("b", "well")))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "problem  a: it is broken."
    assert lines[1].strip() == "cure: mend it."
    assert lines[2] == "ok       b: well"


def test_json(checked, capsys):
    checked(Check("a", lambda: problem("a", "it is broken.", "mend it.")))
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "fit": False,
        "findings": [{"check": "a", "verdict": "problem", "text": "it is broken.", "cure": "mend it."}],
    }


def test_torch_that_cannot_be_imported_is_said_once():
    asked = []

    def broken():
        asked.append(1)
        raise probe.ProbeFailed("importing torch failed: libcudart.so.13: cannot open shared object file")

    quick = [check for check in doctor.checks(probe.Torch(broken)) if check.name != "gloo all-reduce"]
    found = {finding.check: finding for finding in examine(quick)}
    assert "libcudart.so.13" in found["torch"].text
    assert found["torch"].verdict == "problem"
    assert found["memory"].verdict == found["GPU"].verdict == "note"
    assert len(asked) == 1


def test_two_gpus_are_asked_to_add_up_one_is_not(found, monkeypatch):
    monkeypatch.setattr(doctor, "all_reduce", lambda backend: ok(f"{backend} all-reduce", "well"))
    card = {"name": "card", "bytes": 1}
    assert doctor._nccl(found) == []
    assert doctor._nccl(found | {"gpus": [card], "nccl": "2.30.7"}).verdict == "note"
    assert doctor._nccl(found | {"gpus": [card, card], "nccl": "2.30.7"}).verdict == "ok"


def test_real_probe_and_real_all_reduce():
    """The whole chain on this machine: import of torch, memory of a rank, two ranks that add up."""
    before = psutil.Process().children(recursive=True)  # the agent of other tests
    found = probe.look()
    assert found["backends"]["gloo"]
    assert 50e6 < found["rank_bytes"] < 4e9
    finding = all_reduce.all_reduce()
    assert finding.verdict == "ok", finding
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_all_reduce_that_fails_is_a_problem(monkeypatch):
    monkeypatch.setattr(child, "python", lambda *a, **k: child.Answer(1, "", "Traceback\nRunError: rank 1 died"))
    finding = all_reduce.all_reduce()
    assert finding.verdict == "problem"
    assert "RunError: rank 1 died" in finding.text
    monkeypatch.setattr(child, "python", lambda *a, **k: child.Answer(None, "", ""))
    assert "did not finish within 35 s" in all_reduce.all_reduce(limit=5).text


def test_a_child_that_hangs_ends_with_its_own_children(tmp_path):
    program = (
        "import os, subprocess, sys, time, pathlib\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    answer = child.ask([sys.executable, "-c", program], limit=3)
    assert answer.code is None
    assert answer.out == "begun\n"
    grandchild = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(grandchild)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_last_line():
    assert child.Answer(1, "out", "Traceback\n  File\nValueError: no\n\n").last_line == "ValueError: no"
    assert child.Answer(1, "only out\n", "").last_line == "only out"
    assert child.Answer(1, "", "").last_line == "it said nothing"


def test_command_line(capsys):
    assert cli.main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert cli.main(["docter"]) == 2
    assert "has no command 'docter'. Did you mean 'course doctor'?" in capsys.readouterr().err
    assert cli.main(["bench", "lunch"]) == 2
    assert "'course bench' has no command 'lunch'. Did you mean 'course bench launch'?" in capsys.readouterr().err
    assert cli.main([]) == 2


def test_help_loads_nothing_heavy():
    code = "import sys; from course_lib import cli; cli.main(['--help']); assert 'torch' not in sys.modules"
    answer = child.ask([sys.executable, "-c", f"{code}; assert 'psutil' not in sys.modules"], limit=60)
    assert answer.code == 0, answer.err


def test_wrong_option_is_exit_code_two(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--jsn"])
    assert stopped.value.code == 2
    assert "--jsn" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["doctor", "--help"], ["doctor"], ["--help"]])
def test_nobody_reads(words):
    """As in `course doctor | head -1`, where the reader is gone already."""
    code = (
        "import sys; from course_lib import cli; from course_lib.cluster import doctor, examine, finding;"
        "doctor.checks = lambda: [examine.Check('a', lambda: finding.ok('a', 'well'))];"
        f"sys.exit(cli.main({words}))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.returncode in (0, 141)  # 0: argparse swallows it when stdout has no buffer
    assert done.stderr == ""
