"""What a run says about itself: where a bad loss began, MFU, communication, traces, TensorBoard, the plan."""

import json
import math
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel.ddp import DDPOptions, wrap
from course_lib.train import flops
from course_lib.train.board import Board
from course_lib.train.config import Config
from course_lib.train.measure import Overlap
from course_lib.train.model import ModelConfig, build
from course_lib.train.pace import Pace
from course_lib.train.plan import global_batch, hours_left, learning_rate, state_bytes

POISON = """
from course_lib.train import loop
backward, calls = loop.backward, []
def poisoned(job, images, labels, count):
    calls.append(len(labels))
    return backward(job, images * float("nan") if rank == 1 and len(calls) == 7 else images, labels, count)
loop.backward = poisoned
"""


def test_a_nan_on_one_rank_stops_all_and_is_placed(launch, tmp_path, read_rows, read_status):
    """Rows are written each 10 steps, and from step 8 on all ranks have nan: still step 7 and rank 1 are named."""
    words = f"digits --model.width 2 --run.log_every 10 --run.save_every 5 --run.dir {tmp_path / 'run'}"
    done = launch(words, ranks=3, before=POISON)
    assert all(code in (1, -15) for code in done.codes)
    why = "the training loss is nan at step 7; it began on rank 1; a smaller --optim.lr may help"
    assert read_status(tmp_path / "run")["why"] == why
    assert f"Failed: {why}." in done.output(0)
    assert [row["step"] for row in read_rows(tmp_path / "run", "train")] == [5, 10]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000005"]


@pytest.fixture(scope="module")
def measured(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "run"
    words = "digits --model.name mlp --model.width 4 --optim.epochs 1 --run.log_every 4 --run.stop_after 12"
    words += f" --measure.peak_tflops 0.5 --measure.profile_at 11 --run.dir {folder}"  # the run ends within the window
    done = launch(words, ranks=2)
    assert done.codes == [75, 75], done.everything
    return folder, done


def test_numbers_of_a_row(measured, read_rows):
    hidden = 8 * 4
    first, second = 2 * 64 * hidden, 2 * hidden * 10  # the images need no gradient
    a_sample = 2 * first + 3 * second
    for row in read_rows(measured[0], "train"):
        assert row["mfu"] == pytest.approx(a_sample * row["samples_per_s"] / 2 / 0.5e12, rel=1e-9)
        assert 0 <= row["comm_share"] <= 1
        assert 0 <= row["overlap"] <= 1
        assert 10 < row["memory_mib"] < psutil.virtual_memory().total / 2**20
        assert row["grad_norm"] > 0
    assert [row["step"] for row in read_rows(measured[0], "train")] == [4, 8, 12]
    assert "at 100% MFU" in measured[1].output(0)


def test_each_rank_leaves_a_trace(measured):
    for rank in (0, 1):
        events = json.loads((measured[0] / "traces" / f"rank_{rank}.json").read_text())["traceEvents"]
        names = [event.get("name", "") for event in events]
        assert sum(name == "Optimizer.step#SGD.step" for name in names) == 2  # steps 11 and 12, then the run stopped
        assert "gloo:all_reduce" in names
    assert "steps 11 to 12 of each rank" in measured[1].output(0)


def test_flops_by_hand():
    """3x3 convolutions: 2 * 9 * channels in * channels out for each pixel."""
    net = build(ModelConfig(width=4, norm="batch"), (1, 8, 8), 10, seed=0)  # two convolutions, a pool, two Linears
    convolutions = [2 * 9 * 1 * 4 * 64, 2 * 9 * 4 * 8 * 64]
    linears = [2 * (8 * 16) * 64, 2 * 64 * 10]
    assert flops.count(net, (1, 8, 8)) == 2 * convolutions[0] + 3 * (convolutions[1] + sum(linears))
    assert next(net.parameters()).device.type == "cpu"


def test_peaks(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert (flops.peak(0, gpu, half=True), flops.peak(0, gpu, half=False)) == (312e12, 156e12)
    assert flops.peak(2, gpu, half=True) == 2e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T9000")
    assert flops.peak(0, gpu, half=True) is None
    assert flops.peak(0, torch.device("cpu"), half=False) is None


def test_an_overlap_belongs_to_one_row():
    log = {}
    model = SimpleNamespace(
        _get_ddp_logging_data=lambda: log, logger=SimpleNamespace(set_runtime_stats_and_log=lambda: None)
    )
    log |= {"iteration": 1, "backward_comm_time": 8_000_000, "backward_compute_comm_overlap_time": 6_000_000}
    overlap, known = Overlap(model), {"overlap": 0.75}
    assert overlap.row(4) == {}  # DDP has read no clock since
    found = {}
    for step, newest in ((8, 8), (12, 10), (16, 10), (99, 10), (103, 100), (203, 200), (403, 400), (404, 400)):
        log["iteration"] = newest
        found[step] = overlap.row(step - overlap.steps)
    assert found == {8: known, 12: known, 16: {}, 99: {}, 103: known, 203: known, 403: known, 404: {}}


LASTS = 0.3  # seconds of a planted all-reduce


@pytest.fixture
def alone():
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("compute", "hidden"), [(0, 0), (2 * LASTS, LASTS)])
def test_what_of_a_slow_all_reduce_is_exposed(alone, compute, hidden):
    """The bucket of the last layer is LASTS s on its way, while the layer before it still computes `compute` s."""
    device = torch.device("cpu")
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model = wrap(net, torch.zeros(2, 32), DDPOptions(bucket_mb=0.001))

    def slow(_state, bucket):
        future = torch.futures.Future()
        lasts = LASTS if any(p is net[1].weight for p in bucket.parameters()) else 0
        threading.Timer(lasts, future.set_result, [bucket.buffer()]).start()
        return future

    model.register_comm_hook(None, slow)
    net[0].register_forward_hook(lambda *call: call[2].register_hook(lambda _: time.sleep(compute)) and None)
    pace, overlap = Pace(model, device), Overlap(model)
    for _ in range(2):
        began = time.perf_counter()
        model(torch.ones(2, 32)).sum().backward()
        step = time.perf_counter() - began
        own, exposed = pace.seconds()
        assert own >= compute
        assert own + exposed <= step
        assert exposed >= LASTS - hidden - 0.02
        assert exposed < LASTS - hidden + 0.2
        communicated = max(LASTS, compute) + (exposed if hidden else 0)
        assert overlap.row(1)["overlap"] == pytest.approx(1 - exposed / communicated, abs=0.2)


SLOW_STEPS = """
import threading, torch, torch.distributed as dist
from course_lib.train import loop, prepare
wrap, set_rate, now = prepare.wrap, loop.set_rate, {}

def stepping(config, optimizer, step, *rest):
    now["step"] = step
    return set_rate(config, optimizer, step, *rest)

def slow(_state, bucket):
    future, total = torch.futures.Future(), bucket.buffer() / dist.get_world_size()
    work = dist.all_reduce(total, async_op=True)
    def arrive():
        work.wait()
        future.set_result(total)
    threading.Timer(0.3 if now["step"] in (3, 13, 15) else 0, arrive).start()
    return future

def wrapped(*args):
    model = wrap(*args)
    model.register_comm_hook(None, slow)
    return model

loop.set_rate, prepare.wrap = stepping, wrapped
"""


def test_each_row_has_the_communication_of_its_own_steps(launch, tmp_path, read_rows):
    """DDP reads its clocks in its first ten backwards, and the first of them is thrown away by `wrap`."""
    words = "digits --model.name mlp --model.width 2 --data.global_batch 100 --optim.epochs 2 --run.stop_after 17"
    done = launch(f"{words} --run.dir {tmp_path / 'run'}", ranks=2, before=SLOW_STEPS)
    assert done.codes == [75, 75], done.everything
    rows = {row["step"]: row for row in read_rows(tmp_path / "run", "train")}
    waits = {step: row["comm_share"] * samples(step) / row["samples_per_s"] for step, row in rows.items()}
    assert sorted(sorted(waits, key=waits.get)[-3:]) == [3, 13, 15], waits
    assert all(waits[step] >= LASTS - 0.05 for step in (3, 13, 15))
    assert all(row["slowest_s"] < row["comm_share"] * 100 / row["samples_per_s"] for row in map(rows.get, (13, 15)))
    assert [step for step, row in rows.items() if "overlap" in row] == [*range(1, 10)]


def samples(step: int) -> int:
    return 37 if step == 15 else 100  # 1437 = 14 * 100 + 37


SENT = """
from pathlib import Path
from course_lib.train import flight, main
goodbye = main.goodbye
def noted(*args):
    Path("PLACE").joinpath(f"sent_{rank}.json").write_text(flight.dump())
    return goodbye(*args)
main.goodbye = noted
"""


def test_bytes_of_all_reduces_in_sixteen_bits(launch, tmp_path):
    """autocast leaves gradients in float32, so as many bytes are sent; a comm hook in bf16 halves them."""
    sent = {}
    for name in ("none", "amp", "hook"):
        options = {"none": "", "amp": "--amp.dtype bf16", "hook": "--ddp.comm_hook bf16"}[name]
        words = f"digits --model.width 4 --run.stop_after 5 --run.dir {tmp_path / name} {options}"
        done = launch(words, ranks=2, before=SENT.replace("PLACE", str(tmp_path)))
        assert done.codes == [75, 75], done.everything
        sent[name] = [gradients_sent(json.loads((tmp_path / f"sent_{rank}.json").read_text())) for rank in (0, 1)]
    gradients = json.loads((tmp_path / "none" / "config.json").read_text())["gradient_bytes"]
    thrown_away = gradients  # of the backward in `wrap`, before there is a hook
    assert sent["none"] == sent["amp"] == [thrown_away + 5 * gradients] * 2
    assert sent["hook"] == [thrown_away + 5 * gradients // 2] * 2


def gradients_sent(record: dict) -> int:
    """Bytes of all all-reduces of the flight recorder but those of the rows, which are in float64."""
    size = {"Float": 4, "BFloat16": 2, "Double": 0}
    return sum(
        size[entry["input_dtypes"][0]] * math.prod(entry["input_sizes"][0])
        for entry in record["entries"]
        if entry["profiling_name"] == "gloo:all_reduce"
    )


def test_tensorboard_gets_each_number(monkeypatch, tmp_path):
    """TensorBoard itself is no dependency of the course: a stand-in for its writer notes what it is given."""
    got = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            got.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            got.append((name, value, step))

        def flush(self) -> None:
            got.append("flushed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    for wanted in (False, True):
        board = Board(wanted, tmp_path, step=7)
        board.write("train", 8, {"loss": 0.5, "lr": 0.1})
        board.settle()
    folder = str(tmp_path / "tensorboard")
    assert got == [(folder, 8), ("train/loss", 0.5, 8), ("train/lr", 0.1, 8), "flushed"]


def job(words: str = "", ranks: int = 4, **more):
    """As much of a Job as the plan looks at."""
    from course_lib.train.cli import parse
    from course_lib.train.data import settled
    from course_lib.train.order import Order

    config: Config = parse(["digits", *words.split()])
    config.__dict__["data"] = settled(config.data, ranks)
    order = Order(0, 100, config.data.global_batch)
    module = nn.Linear(10, 10)  # 110 parameters, 440 bytes
    return SimpleNamespace(config=config, order=order, env=SimpleNamespace(world_size=ranks), module=module, **more)


def test_the_plan_in_numbers():
    assert (
        global_batch(job("--data.batch 4"))
        == "48 = 4 per rank x 4 ranks x 3 microbatches, the last one of an epoch has 4"
    )
    assert learning_rate(job("--optim.lr 0.1 --optim.reference_batch 16")).startswith(
        "sgd, 0 to 0.3 (0.1 for 16, scaled with the batch) in 1 epochs"
    )
    assert "adamw, ZeRO-1, 0 to 0.2 (0.1 for 12, scaled with the square root of the batch)" in learning_rate(
        job("--optim.name adamw --optim.zero --optim.lr 0.1 --optim.reference_batch 12")
    )
    assert state_bytes(job()) == 440 * 4  # weights, gradients, buckets, momentum
    assert state_bytes(job("--optim.momentum 0 --ddp.gradient_as_bucket_view")) == 440 * 2
    assert state_bytes(job("--optim.name adamw --optim.zero --optim.average 0.9")) == 440 * 4 + 2 * 440 // 4


def test_hours_are_expected_only_of_a_run_that_was_measured(tmp_path):
    def rows(*speeds, ranks=4):
        start = {"event": "start", "step": 0, "ranks": ranks}
        train = [{"event": "train", "step": i, "samples_per_s": speed} for i, speed in enumerate(speeds, 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [start, *train]))
        return hours_left(job(folder=tmp_path, start=3, total=6))  # steps 4 to 6: 48 + 48 + 4 samples

    assert rows() == ""
    assert rows(10, 20, 5000) == "0.0014 hours of training for the rest, at the 20 samples/s so far"
    assert rows(10, 20, 5000, ranks=2) == ""
