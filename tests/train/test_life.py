"""A run's life: started, stopped, continued, refused, failed. See test_survival.py for kill -9."""

import html
import json
import math
import os
import signal
import time

import psutil
import pytest

from course_lib.train import checkpoint
from course_lib.train.display import Progress
from course_lib.train.launches import Launch, previous
from course_lib.train.main import main
from course_lib.train.metrics import MetricsFile
from course_lib.train.record import TrainRun
from course_lib.train.status import is_consequence

SHORT = "digits --model.width 4 --optim.epochs 2"  # 60 steps
DIGITS = "digits --optim.epochs 4"  # 120 steps, enough to learn them
SLOW = """
import time
from course_lib.train import loop
step = loop.seed_step
def slow(*args):
    time.sleep(0.05)
    step(*args)
loop.seed_step = slow
"""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def rows(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGINT, 0), (signal.SIGUSR1, 1)])
def test_signal_stops_all_and_the_run_goes_on(start, launch, tmp_path, read_rows, read_status, number, victim):
    words = f"{SHORT} --run.dir {tmp_path / 'run'}"
    before = time.time()
    running = start(words, ranks=2, before=SLOW)
    wait_for(lambda: len(rows(tmp_path / "run")) > 5)
    for _ in range(3):  # launchers repeat themselves
        os.kill(running.pids[victim], number)
    assert running.wait().codes == [75, 75], running.everything
    status = read_status(tmp_path / "run")
    assert status["status"] == "stopped"
    assert status["why"] == f"rank {victim} received {signal.Signals(number).name}"
    assert "Stopped (rank" in running.output(0)
    step = status["step"]
    assert step < 60
    assert (tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "state.pt").exists()
    assert launch(words, ranks=2).codes == [0, 0]
    assert [row["step"] for row in read_rows(tmp_path / "run", "train")] == list(range(1, 61))
    first, second = read_rows(tmp_path / "run", "start")
    assert (first["step"], second["step"]) == (0, step)
    assert "previous" not in first
    assert second["previous"] == {key: status[key] for key in ("status", "why", "step", "time")}
    ended = read_status(tmp_path / "run")
    assert ended["status"] == "finished"
    assert before < first["time"] < status["time"] < second["time"] < ended["time"] < time.time()
    assert TrainRun.read(tmp_path / "run").launches == [
        Launch(first["time"], status["time"], 0, step, 2, "stopped", status["why"]),
        Launch(second["time"], ended["time"], step, 60, 2, "finished", ""),
    ]


def test_second_launch_is_refused(start, tmp_path, capsys, read_status):
    folder = tmp_path / "run"
    running = start(f"{SHORT} --run.dir {folder}", ranks=2, before=SLOW.replace("0.05", "1"))
    wait_for(lambda: len(rows(folder)) > 1)
    assert main([*SHORT.split(), "--run.dir", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith(f"Another launch is training in {folder} right now")
    os.kill(running.pids[0], signal.SIGTERM)
    assert running.wait().codes == [75, 75]
    assert read_status(folder)["status"] == "stopped"


@pytest.fixture(scope="module")
def finished(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    done = launch(f"{DIGITS} --run.dir {folder}", ranks=2)
    assert done.codes == [0, 0], done.everything
    return folder, done


def test_digits_are_learned(finished, read_rows):
    folder, _ = finished
    run = TrainRun.read(folder)
    assert run.status == "finished"
    assert run.accuracy >= 0.96
    assert run.accuracy == read_rows(folder, "eval")[-1]["right"] / 360
    assert run.losses[-1] < run.losses[0] / 5
    assert len(run.losses) == len(run.steps) == 120
    assert "0.9" in repr(run)
    assert "<img" in run._repr_html_()


def test_the_plan_is_printed_before_the_first_step(finished):
    said = finished[1].output(0)
    plan = said[: said.index("epoch   1")]
    assert "48 = 24 per rank x 2 ranks, the last one of an epoch has 45" in plan
    assert "30 an epoch x 4 epochs = 120" in plan
    assert "38,282 parameters" in plan
    assert f"{38282 * 4 / 2**20:.2f} MiB" in plan
    assert "backend gloo" in plan or "backend nccl" in plan
    assert str(finished[0]) in plan
    run = TrainRun.read(finished[0])
    assert len(run.plan.splitlines()) > 8 and run.plan in plan
    assert html.escape(run.plan) in Progress(run, 1.0)._repr_mimebundle_()["text/html"]  # a notebook shows it, too
    assert finished[1].output(1) == ""  # only rank 0 speaks


def test_what_a_run_folder_holds(finished, read_rows):
    folder, _ = finished
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"] == "digits"
    assert config["config"]["optim"]["lr"] == 0.05
    assert (config["ranks"], config["steps"], config["parameters"]) == (2, 120, 38282)
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    always = {"event", "step", "epoch", "loss", "lr", "grad_norm", "samples_per_s", "data_wait", "memory_mib"}
    assert row.keys() == always | {"comm_share", "overlap", "slowest_rank", "slowest_s", "others_s"}
    read = [row["step"] for row in read_rows(folder, "train") if "overlap" in row]
    assert read == [*range(1, 10), 99]  # as DDP reads its clocks, which counts one step more, see `wrap`
    assert all("comm_share" in row for row in read_rows(folder, "train"))
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step_00000090",
        "step_00000120",
    ]


def test_finished_is_finished_and_more_epochs_go_on(finished, launch, read_rows):
    folder, _ = finished
    again = launch(f"{DIGITS} --run.dir {folder}", ranks=2)
    assert again.codes == [0, 0]
    assert len(read_rows(folder, "train")) == 120
    longer = launch(f"digits --run.dir {folder} --optim.epochs 5", ranks=3)
    assert longer.codes == [0, 0, 0]
    assert "comes from 2 ranks and 3 continue" in longer.output(0)
    assert [row["step"] for row in read_rows(folder, "train")] == list(range(1, 151))
    fewer = launch(f"digits --run.dir {folder} --optim.epochs 2", ranks=1)
    assert fewer.codes == [2]
    assert "has done 150 steps, more than the 60 of this launch" in fewer.output(0)


def test_another_configuration_is_refused(finished, launch):
    folder, _ = finished
    kept = (folder / "config.json").read_bytes(), (folder / "status.json").read_bytes()
    done = launch(f"{DIGITS} --run.dir {folder} --optim.lr 0.2 --model.width 8 --run.keep 5", ranks=2)
    assert done.codes[0] == 2
    assert "model.width (16 there, 8 here); optim.lr (0.05 there, 0.2 here)" in done.output(0)
    assert "run.keep" not in done.output(0)
    assert kept == ((folder / "config.json").read_bytes(), (folder / "status.json").read_bytes())


RAISE = """
from course_lib.train import loop
set_rate = loop.set_rate
def bad(config, optimizer, step, *rest):
    if rank == 1 and step == 5:
        raise KeyError("bad sample 1234")
    return set_rate(config, optimizer, step, *rest)
loop.set_rate = bad
"""


def test_an_exception_names_its_rank(launch, tmp_path, read_status):
    done = launch(f"{SHORT} --run.dir {tmp_path / 'run'}", ranks=2, before=RAISE)
    assert done.codes[1] in (1, -15)
    assert 0 not in done.codes
    status = read_status(tmp_path / "run")
    assert (status["status"], status["rank"]) == ("failed", 1)
    assert status["why"] == "rank 1 raised KeyError: 'bad sample 1234'"
    assert 'raise KeyError("bad sample 1234")' in status["traceback"] or "in bad" in status["traceback"]
    assert status["step"] <= 5
    assert "the processes" not in TrainRun.read(tmp_path / "run").why


def test_a_vanished_rank_ends_the_run(launch, tmp_path, read_status):
    vanish = RAISE.replace('raise KeyError("bad sample 1234")', "import os; os._exit(7)")
    done = launch(f"{SHORT} --run.dir {tmp_path / 'run'}", ranks=2, before=vanish)
    assert done.codes[1] == 7
    assert done.codes[0] in (1, -15)  # by its own error, or by the launcher right after it
    status = read_status(tmp_path / "run")
    assert status["status"] == "failed"
    assert status["why"].startswith("rank 0 lost the connection to another rank, which died or hangs")


def test_a_loss_that_is_no_number_fails_the_run(launch, tmp_path, read_rows, read_status):
    done = launch(f"{SHORT} --run.dir {tmp_path / 'run'} --optim.lr 1e30 --run.keep 99", ranks=2)
    assert all(code in (1, -15) for code in done.codes)  # torchrun may end the second one of them
    *before, last = read_rows(tmp_path / "run", "train")
    assert all(math.isfinite(row["loss"]) for row in before)
    assert not math.isfinite(last["loss"])
    status = read_status(tmp_path / "run")
    assert status["status"] == "failed"
    assert status["why"].startswith(f"the training loss is {last['loss']} at step {last['step']};")
    assert f"Failed: {status['why']}. The run is in" in done.output(0)
    assert "Traceback" not in done.everything
    assert "Finished" not in done.everything
    assert all(f"step_{last['step']:08d}" not in str(path) for path in (tmp_path / "run").rglob("*"))


@pytest.mark.parametrize(
    ("error", "right"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2791"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (type("DistNetworkError", (RuntimeError,), {})("Failed to recv, got 0 bytes."), True),
        (type("DistStoreError", (RuntimeError,), {})("wait timeout after 120000ms, keys: /x"), True),
        (NotADirectoryError(20, "Not a directory", "checkpoints/.DS_Store"), False),
        (FileNotFoundError(2, "No such file or directory", "/data/TCPStore/nccl error/a.png"), False),
        (RuntimeError("cannot restore the state from store/gloo/socket.pt"), False),
    ],
)
def test_cause_or_consequence(error, right):
    assert is_consequence(error) is right


FULL = """
import resource
from course_lib.train import loop
set_rate = loop.set_rate
def full(config, optimizer, step, *rest):
    if (rank, step) == (0, {step}):
        resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return set_rate(config, optimizer, step, *rest)
loop.set_rate = full
"""


@pytest.fixture(scope="module")
def troubled(launch, tmp_path_factory):
    """One run whose disk is full twice, whose time is up, whose newest checkpoint is damaged, and which finishes."""
    folder, seen = tmp_path_factory.mktemp("troubled") / "run", {}

    def live(name, more="", before=""):
        done = launch(f"{SHORT} --run.save_every 5 --run.dir {folder} {more}", ranks=2, before=before)
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        seen[name] = (done, json.loads((folder / "status.json").read_text()), left)

    live("rows", before=FULL.format(step=8, bytes=1000))  # metrics.jsonl is longer than that already
    live("background", "--run.save_in_background", before=FULL.format(step=9, bytes=20_000))  # a checkpoint has 80 KB
    live("time", "--run.max_minutes 0.0001")
    newest = folder / "checkpoints" / "step_00000006" / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    live("damaged", "--run.save_in_background")
    return folder, seen


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows", "metrics.jsonl cannot be written to "),
        ("background", "The checkpoint of step 10 cannot be written to "),
    ],
)
def test_a_full_disk_stops_all_ranks_with_a_sentence(troubled, name, said):
    """Found out by rank 0 alone, in a row or by the thread that writes. All leave; the older checkpoint is whole."""
    folder, seen = troubled
    done, status, left = seen[name]
    assert done.codes[0] == 74, done.everything
    assert done.codes[1] in (74, -15)  # the launcher may be quicker
    assert status["status"] == "failed"
    assert status["why"].startswith(f"{said}{folder}")
    assert "File too large. The checkpoints from before are whole: make room" in status["why"]
    assert left == ["step_00000005"]
    assert "Traceback" not in done.everything
    if name == "background":  # else the log is longer than files may be
        assert status["why"] in done.output(0)


def test_time_is_up(troubled):
    done, status, left = troubled[1]["time"]
    assert done.codes == [75, 75], done.everything
    assert (status["status"], status["why"], status["step"]) == ("stopped", "run.max_minutes are over", 6)
    assert left == ["step_00000005", "step_00000006"]


def test_a_damaged_checkpoint_is_skipped_aloud(troubled, read_rows):
    folder, seen = troubled
    done, status, left = seen["damaged"]
    assert done.codes == [0, 0], done.everything
    said = f"The checkpoint {folder / 'checkpoints' / 'step_00000006'} is damaged and is skipped: state.pt has "
    assert said in done.output(0)
    assert status["status"] == "finished"
    assert left == ["step_00000055", "step_00000060"]
    assert [row["step"] for row in read_rows(folder, "train")] == list(range(1, 61))
    assert [row["step"] for row in read_rows(folder, "start")] == [0, 5, 5, 5]
    known = TrainRun.read(folder).launches
    assert [launch.status for launch in known] == ["failed", "failed", "stopped", "finished"]
    whys = [seen[name][1]["why"] for name in ("rows", "background", "time", "damaged")]
    assert [launch.why for launch in known] == whys
    lasts = [launch.last for launch in known]
    assert (lasts[0], *lasts[2:]) == (7, 6, 60)
    assert 10 < lasts[1] < 15  # the thread that writes was heard of a row or two later


def test_each_launch_stays_on_record(tmp_path):
    """Also one that went on from a checkpoint which was damaged afterwards; what cannot be known is unknown."""
    path = tmp_path / "metrics.jsonl"
    assert MetricsFile(path, 0).last is None
    kinds = [("start", 0), ("train", 5), ("train", 10), ("start", 10), ("train", 12)]
    path.write_text("".join(json.dumps({"event": event, "step": step}) + "\n" for event, step in kinds))
    assert MetricsFile(path, 5).last == 12
    assert [(row["event"], row["step"]) for row in map(json.loads, rows(tmp_path))] == [
        ("start", 0), ("train", 5), ("start", 10)
    ]  # fmt: skip
    assert previous(tmp_path, 12)["status"] == "killed"  # between its start row and its status.json
    (tmp_path / "status.json").write_text('{"sta')
    assert previous(tmp_path, 12) == {
        "status": "unknown", "why": "status.json cannot be read", "step": 12, "time": None
    }  # fmt: skip


def test_strangers_among_the_checkpoints_stay(tmp_path):
    place = tmp_path / "checkpoints"
    (place / ".step_00000003").mkdir(parents=True)  # of a launch that was killed while it wrote
    (place / ".old-step_00000001").mkdir()
    (place / ".Trashes").mkdir()
    (place / ".DS_Store").write_text("of the Finder")
    (place / "step_00000001 copy").mkdir()
    (place / "step_00000001 copy" / "state.pt").write_text("mine")
    (place / "step_00000009").write_text("a file")
    for step in (4, 5):
        checkpoint.save(tmp_path, {"step": step}, keep=1)
    assert sorted(path.name for path in place.iterdir()) == [
        ".DS_Store", ".Trashes", "step_00000001 copy", "step_00000005", "step_00000009"
    ]  # fmt: skip
    assert checkpoint.saved(tmp_path) == [place / "step_00000005"]


def test_loaders_leave_signals_to_their_rank(start, tmp_path, read_status):
    running = start(f"{SHORT} --optim.epochs 1 --data.workers 2 --run.dir {tmp_path / 'run'}", ranks=1, before=SLOW)
    wait_for(lambda: len(rows(tmp_path / "run")) > 3)
    loaders = psutil.Process(running.pids[0]).children()
    assert len(loaders) >= 2
    for loader in loaders:
        loader.terminate()
    assert running.wait().codes == [0], running.everything
    assert read_status(tmp_path / "run")["status"] == "finished"
