"""`train(...)` as a notebook calls it: the real torchrun, live progress, interrupt, failures."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import course_lib.train
from course_lib import train
from course_lib.launch import RunInterrupted
from course_lib.launch.supervise import supervisor
from course_lib.train.curve import curve_svg
from course_lib.train.display import Live, Progress
from course_lib.train.errors import ConfigError
from course_lib.train.notebook import TrainError, judge
from course_lib.train.notebook import train as train_function
from course_lib.train.record import TrainRun
from course_lib.train.said import spoken

SHORT = {"model.width": 4, "optim.epochs": 2}


def test_the_package_is_also_a_function():
    assert train is course_lib.train
    assert callable(train)
    code = "import sys; from course_lib import train; assert 'torch' not in sys.modules; print(callable(train))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One real call, in a fresh working folder, with what it printed."""
    import contextlib
    import io

    said, before = io.StringIO(), Path.cwd()
    os.chdir(tmp_path_factory.mktemp("my course"))
    try:
        with contextlib.redirect_stdout(said):
            run = train("digits", ranks=2, timeout=150, **SHORT, **{"optim.lr": 0.1})
        yield run, said.getvalue(), Path.cwd()
    finally:
        os.chdir(before)


def test_returns_the_run(trained):
    run, _, folder = trained
    assert isinstance(run, TrainRun)
    assert run.status == "finished"
    assert run.steps == list(range(1, 61))
    assert run.losses[-1] < run.losses[0]
    assert run.config["optim"]["lr"] == 0.1
    assert 0 < run.accuracy <= 1
    assert run.dir.parent == Path("runs")
    assert run.dir.name.startswith("digits-")
    assert "Finished" in (folder / run.dir / "output.log").read_text()


def test_prints_the_command_and_progress(trained):
    run, said, _ = trained
    lines = said.splitlines()
    assert lines[0] == (
        "$ torchrun --standalone --nproc-per-node=2 -m course_lib.train digits --model.width 4 --optim.epochs 2 "
        f"--optim.lr 0.1 --run.dir {run.dir}"
    )
    assert lines[1].startswith("starting the ranks")
    assert "step 60/60" in lines[-1]


def test_the_printed_command_works_in_a_terminal(trained):
    """Typed again it continues: here, it finds everything done. (With one rank: each imports torch anew.)"""
    _, said, folder = trained
    words = said.splitlines()[0].removeprefix("$ torchrun ").replace("node=2", "node=1").split()
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "60, 60 are done" in done.stdout


def test_bad_options_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call, said in [
        ({"optim.lrr": 1}, "did you mean --optim.lr?"),
        ({"data.global_batch": 5}, "5 cannot be divided among 2 ranks"),
    ]:
        with pytest.raises(ConfigError, match=r"did you mean|divided") as caught:
            train("digits", ranks=2, **call)
        assert said in str(caught.value)
    for call in (lambda: train("digits", 0), lambda: train("digits", ranks=0)):
        with pytest.raises(ConfigError, match="ranks must be a whole number"):
            call()
    for recipe in (None, 1):
        with pytest.raises(ConfigError, match=f"The recipe must be a name, for example 'digits', but is {recipe}"):
            train(recipe)
    for value in (True, False):
        with pytest.raises(ConfigError, match=r"no option --strict; did you mean --data\.strict\?"):
            train("digits", strict=value)
    with pytest.raises(ConfigError, match="no recipe 'digts'"):
        train("digts")
    assert list(tmp_path.iterdir()) == []


def test_the_package_has_the_functions_signature():
    module, function = (inspect.signature(f).parameters for f in (train, train_function))
    assert list(module) == list(function)
    assert [p.default for p in module.values()] == [p.default for p in function.values()]


def test_a_current_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="The current folder is not there any more"):
        train("digits")


def test_what_the_ranks_refuse_is_one_sentence(trained):
    run, _, _ = trained
    with pytest.raises(ConfigError) as caught:
        train("digits", ranks=2, timeout=150, dir=run.dir, **{"model.width": 8})
    assert str(caught.value).startswith(f"{run.dir} holds a run of another configuration")
    assert "\n" not in str(caught.value)
    assert TrainRun.read(run.dir).status == "finished"


def test_interrupt_saves_and_leaves_nothing(tmp_path):
    folder = tmp_path / "run"

    def interrupt():
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") > 3:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(RunInterrupted) as caught:
        train("digits", ranks=2, timeout=170, dir=folder, **{"optim.epochs": 2000, "model.width": 4})
    thread.join()
    assert str(caught.value) == f"Stopped. To continue: train(..., dir={str(folder)!r})."
    run = TrainRun.read(folder)
    assert run.status == "stopped"
    assert "received SIGTERM" in run.why
    assert (folder / "checkpoints").exists()
    assert psutil.Process(supervisor().agent).children(recursive=True) == []


def failed_run(folder, **status):
    from course_lib.train.folder import write_json

    folder.mkdir()
    write_json(folder / "config.json", {"recipe": "digits", "config": {}, "data": {"note": ""}, "steps": 9, "ranks": 2})
    write_json(folder / "status.json", {"step": 3, **status})
    return folder


def test_a_failure_shows_the_culprits_traceback(tmp_path):
    folder = failed_run(tmp_path / "a", status="failed", why="rank 1 raised KeyError: 'x'", traceback="Traceback: x")
    with pytest.raises(TrainError) as caught:
        judge(folder, 0, "")
    assert str(caught.value) == "The run failed: rank 1 raised KeyError: 'x'.\n\nTraceback: x"
    assert caught.value._render_traceback_() == [f"TrainError: {caught.value}"]


NETWORK = """
from course_lib.train.config import Config, ModelConfig

def network(shape, classes):
    return a_slip

def recipe():
    return Config(model=ModelConfig(f"{__file__}:network"))
"""


def test_a_network_that_raises_shows_its_line_from_a_forked_start_too(tmp_path, monkeypatch):
    (tmp_path / "slip.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainError, match="The run failed before its first step") as raised:
        train("slip.py:recipe", ranks=2, dir="run", timeout=100)
    text = str(raised.value)
    assert 'slip.py", line 5, in network' in text and text.endswith("NameError: name 'a_slip' is not defined")
    assert "multiprocessing" not in text and "E" + time.strftime("%m%d") not in text
    sys.modules.pop("slip")


UNUSED = """
from torch import nn
from course_lib.train.config import Config, DataConfig, ModelConfig

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x.flatten(1))

def network(shape, classes):
    return Net()

def recipe():
    return Config(data=DataConfig(workers=1), model=ModelConfig(f"{__file__}:network"))
"""


def test_a_rank_that_fails_ends_with_its_loaders(tmp_path, monkeypatch):
    """They leave SIGTERM to the rank, by which Python ends them at its exit: it would wait for them for ever."""
    (tmp_path / "unused.py").write_text(UNUSED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TrainError, match="parameters that were not used in producing loss"):
        train("unused.py:recipe", ranks=2, dir="run", timeout=100)
    sys.modules.pop("unused")


def test_a_killed_run_shows_the_last_output(tmp_path):
    folder = failed_run(tmp_path / "a", status="running", why="")
    with pytest.raises(TrainError, match=r"without a word at step 3: .*kill -9(.|\n)*last words"):
        judge(folder, 0, "first\nlast words")


def test_spoken_leaves_out_torchruns_report():
    output = "one\n\ntwo\nE1129 19:42:57.777000 10712 torch/x.py:1002] failed\nTraceback (most recent call last):\n"
    assert spoken(output) == ["one", "two"]


def test_curve():
    import xml.etree.ElementTree as tree

    svg = tree.fromstring(curve_svg([1, 2, 3, 4], [2.0, 1.0, float("nan"), 0.5], total=4))
    (line,) = svg.findall("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # falling loss: y grows downwards
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1])  # halves are equal on this axis
    tree.fromstring(curve_svg([], [], total=4))


def test_progress_in_words_and_html(trained):
    run, _, _ = trained
    bundle = Progress(run, 12.0)._repr_mimebundle_()
    assert "step 60/60" in bundle["text/plain"]
    assert 'src="data:image/svg+xml;base64,' in bundle["text/html"]
    assert Progress(None, 3.0).text() == "starting the ranks ... 3 s"
    assert not Live().notebook  # pytest is no kernel
