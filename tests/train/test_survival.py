"""One run that everything happens to, on 3 ranks under torchrun, ends with the bits of the one that was left alone.

BatchNorm, dropout, augmentation and bf16; stopped and killed in the middle of epochs; with and without loader workers,
and with checkpoints written in the background. Each event comes from inside, in a certain step of a certain rank, so
nothing here depends on the speed of the machine.
"""

import contextlib
import json
import time
from itertools import pairwise

import psutil
import pytest
import torch

from course_lib.train.record import TrainRun
from course_lib.train.soak_rounds import equal_bits

pytestmark = pytest.mark.slow
HARD = (  # 1437 = 11 * 120 + 117: 12 steps an epoch, 24 in all, a checkpoint after each 5th and each 12th
    "digits --model.width 4 --model.norm batch --model.dropout 0.3 --data.augment crop --amp.dtype bf16 "
    "--data.global_batch 120 --optim.epochs 2 --run.save_every 5 --run.keep 99"
)
EVENT = """
import os, signal, time, psutil
from course_lib.train import loop
set_rate = loop.set_rate
def then(config, optimizer, step, *rest):
    if (step, rank, restart) == ({step}, {rank}, 0):
        {deed}
    return set_rate(config, optimizer, step, *rest)
loop.set_rate = then
"""
TERM_TORCHRUN = "os.kill(os.getppid(), signal.SIGTERM); time.sleep(1)"  # torchrun then tells all ranks
TERM_ITSELF = "os.kill(os.getpid(), signal.SIGTERM)"
KILL_ITSELF = "os.kill(os.getpid(), signal.SIGKILL)"
KILL_TORCHRUN = "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"
SAVED = "next(0 for _ in range(3000) if os.path.exists({path!r}) or time.sleep(0.01)); "  # at most half a minute
KILL_ALL = (
    "launcher = psutil.Process(os.getppid()); others = launcher.children(recursive=True); launcher.kill(); "
    "[other.kill() for other in others if other.pid != os.getpid()]; os.kill(os.getpid(), signal.SIGKILL)"
)


def state(folder):
    newest = max((folder / "checkpoints").iterdir())
    return torch.load(newest / "state.pt", weights_only=True)


@pytest.fixture(scope="module")
def history(start, launch, tmp_path_factory):
    """What each launch left behind: its exit code, status, and the processes of its ranks that were still there."""
    folder, seen = tmp_path_factory.mktemp("survival"), {}
    calm = launch(f"{HARD} --run.dir {folder / 'straight'}", ranks=3)
    assert calm.codes == [0, 0, 0], calm.everything

    def live(name, step, rank, deed, more=""):
        words = f"{HARD} {more} --run.dir {folder / 'hurt'}"
        running = start(words, ranks=3, before=EVENT.format(step=step, rank=rank, deed=deed), restarts=2)
        torchrun, family = psutil.Process(running.pids[0]), set()
        while torchrun.is_running() and torchrun.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                family |= set(torchrun.children(recursive=True))
            time.sleep(0.5)  # looking at all processes costs more than it seems
        codes = running.wait().codes
        left = psutil.wait_procs(family, timeout=10)[1]
        seen[name] = {"code": codes[0], "left": left, "said": running.output()}
        seen[name] |= {
            "run": TrainRun.read(folder / "hurt"),
            "status": json.loads((folder / "hurt" / "status.json").read_text()),
        }

    live("SIGTERM to torchrun", 8, 0, TERM_TORCHRUN)
    live("SIGTERM to a rank", 11, 1, TERM_ITSELF, "--data.workers 1")
    live("kill -9 of torchrun", 14, 2, KILL_TORCHRUN, "--data.workers 1")
    saved = SAVED.format(path=f"{folder}/hurt/checkpoints/step_00000015")  # in the background: it may be late
    live("kill -9 of everything", 17, 1, saved + KILL_ALL, "--run.save_in_background")
    live("kill -9 of a rank", 22, 2, KILL_ITSELF, "--data.workers 1")
    return folder, seen


def test_the_bits_are_those_of_the_straight_run(history):
    straight, hurt = state(history[0] / "straight"), state(history[0] / "hurt")
    assert straight["step"] == hurt["step"] == 24
    assert equal_bits(straight["model"], hurt["model"])
    assert equal_bits(straight["optimizer"], hurt["optimizer"])


def test_the_rows_are_those_of_the_straight_run(history, read_rows):
    straight, hurt = (
        [[row[key] for key in ("step", "loss", "grad_norm", "lr")] for row in read_rows(history[0] / run, "train")]
        for run in ("straight", "hurt")
    )
    assert straight == hurt
    assert len(hurt) == 24


def test_each_launch_goes_on_from_the_newest_checkpoint(history, read_rows):
    """Signals save at once; kill -9 costs what came after the last checkpoint. The last one went on by itself."""
    _, seen = history
    assert [row["step"] for row in read_rows(history[0] / "hurt", "start")] == [0, 8, 11, 12, 15, 20], seen


@pytest.mark.parametrize(("name", "code"), [("SIGTERM to torchrun", 1), ("SIGTERM to a rank", 0)])
def test_signals_stop_in_good_order(history, name, code):
    """0, although stopped: with any other code torchrun would have started the ranks again."""
    seen = history[1][name]
    assert seen["status"]["status"] == "stopped", seen
    assert seen["status"]["why"].endswith("received SIGTERM")
    assert seen["code"] == code, seen["said"]
    assert "Traceback" not in seen["said"].split("Stopped (rank")[0]


def test_a_killed_rank_is_replaced(history):
    seen = history[1]["kill -9 of a rank"]
    assert seen["code"] == 0, seen["said"]
    assert seen["status"]["status"] == "finished"
    assert "20 are done" in seen["said"]


@pytest.mark.parametrize("name", ["kill -9 of torchrun", "kill -9 of everything"])
def test_who_was_killed_said_nothing(history, name):
    """Then nobody holds the lock, though status.json says that the run is running."""
    run = history[1][name]["run"]
    assert (run.details["status"], run.status) == ("running", "killed")
    assert run.why.startswith("the processes ended without a word")


def test_each_launch_knows_how_the_one_before_ended(history):
    """torchrun starts a launch of its own when a rank was killed: the ranks that were left had noted a failure."""
    run = TrainRun.read(history[0] / "hurt")
    assert [(one.first, one.status) for one in run.launches] == [
        (0, "stopped"), (8, "stopped"), (11, "killed"), (12, "killed"), (15, "failed"), (20, "finished")
    ]  # fmt: skip
    whys = [one.why for one in run.launches]
    assert whys[0].endswith("received SIGTERM")
    assert whys[1] == "rank 1 received SIGTERM"
    assert whys[2] == whys[3] == history[1]["kill -9 of everything"]["run"].why
    assert whys[4].startswith(("rank 0 lost the connection", "rank 1 lost the connection"))
    killed = [history[1][name]["run"].steps[-1] for name in ("kill -9 of torchrun", "kill -9 of everything")]
    assert [one.last for one in run.launches] == [8, 11, *killed, 21, 24]
    assert killed[0] in (12, 13) and killed[1] in (15, 16)  # rank 0 may have died before it wrote the newest row
    assert all(one.began < one.ended for one in run.launches)
    assert all(early.ended < late.began for early, late in pairwise(run.launches))


def test_nothing_is_left(history):
    assert {name: seen["left"] for name, seen in history[1].items()} == {name: [] for name in history[1]}
