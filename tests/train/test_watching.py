"""A run that stalls, has a slow rank, and hangs at last, on 3 ranks; and the parts of it alone."""

import json
import threading
from datetime import timedelta

import pytest
import torch
import torch._C._distributed_c10d as c10d
from torch import distributed as dist
from torch import nn

from course_lib.train import flight
from course_lib.train.meeting import fresh
from course_lib.train.pace import IN_A_ROW, Suspicion, compare

FOLDER = "RUN"
STORY = """
import json, os, time
from pathlib import Path
from course_lib.train import loop, prepare
from course_lib.train.status import read_status
folder, set_rate, build = Path("RUN"), loop.set_rate, prepare.model.build

def wait_until(done):
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        time.sleep(0.05)

def trouble(config, optimizer, step, *rest):
    if rank == 1 and step == 1:
        time.sleep(5)  # longer than the time-out of later steps
    if rank == 1 and step == 6:  # until all three have written where they are
        wait_until(lambda: len(list(folder.glob("stalls/step_00000005/rank_*.json"))) == 3)
    if rank == 1 and step == 40:
        wait_until(lambda: read_status(folder).get("status") == "failed")
        os._exit(7)
    return set_rate(config, optimizer, step, *rest)

def slow(*args):
    network = build(*args)
    if rank == 2:
        network.register_forward_pre_hook(lambda *_: time.sleep(0.25))  # others must not come near it on a busy machine
    return network

loop.set_rate, prepare.model.build = trouble, slow
"""


@pytest.fixture(scope="module")
def story(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("watching") / "run"
    words = "digits --model.width 2 --model.norm batch --optim.epochs 2 --run.save_every 10 --run.stall 1"
    done = launch(f"{words} --run.timeout 4 --run.dir {folder}", ranks=3, before=STORY.replace(FOLDER, str(folder)))
    return folder, done


def test_a_stall_is_reported_with_the_missing_rank_and_all_stacks(story):
    folder, done = story
    place = folder / "stalls" / "step_00000005"
    said = [line for line in done.output(0).splitlines() if "after step 5:" in line]
    assert len(said) == 1, done.output(0)
    assert said[0].startswith("No step for 1 s after step 5: rank 1 did not come to ")
    assert said[0].endswith(f". Where each rank is: {place}")
    assert "in trouble" in (place / "rank_1.txt").read_text()
    assert "in trouble" not in (place / "rank_0.txt").read_text()
    assert "in fit" in (place / "rank_0.txt").read_text()


def test_the_first_step_may_take_longer_than_the_later_ones(story, read_status, read_rows):
    """Rank 1 came five seconds late to step 1, and nobody minded; in step 40 it does not come within four."""
    folder, _ = story
    recorded = json.loads((folder / "stalls" / "step_00000005" / "rank_0.json").read_text())["entries"]
    limits = [entry["timeout_ms"] for entry in recorded if entry["process_group"][1] == "default_pg"]
    assert (limits[0], limits[-1]) == (600_000, 4000)
    status = read_status(folder)
    assert status["status"] == "failed"
    assert "lost the connection to another rank, which died or hangs" in status["why"]
    assert read_rows(folder, "train")[-1]["step"] == 39


def test_a_slow_rank_is_named_once(story, read_rows):
    """BatchNorm's buffers are sent in each forward, where the others wait for nobody but rank 0."""
    folder, done = story
    said = [line for line in done.output(0).splitlines() if "is slow" in line]
    assert len(said) == 1, done.output(0)
    step = int(said[0].split()[1].rstrip(":"))
    assert said[0].startswith(f"step {step}: rank 2 is slow: it needs ")
    assert step >= IN_A_ROW
    accused = [row for row in read_rows(folder, "train") if row["slowest_rank"] == 2]
    assert len(accused) > 30  # of 39
    assert all(row["slowest_s"] >= max(0.25, row["others_s"]) for row in accused)


def test_suspicion_needs_steps_in_a_row():
    slow, fair = compare([0.1, 0.3, 0.1, 0.1]), compare([0.1, 0.12, 0.1, 0.1])
    other = compare([0.3, 0.1, 0.1, 0.1])
    suspicion = Suspicion()
    for row in [slow] * (IN_A_ROW - 1) + [fair] + [slow] * (IN_A_ROW - 1) + [other] * (IN_A_ROW - 1) + [{}]:
        assert suspicion.look(row, 1) is None
    assert "rank 1 is slow: it needs 300 ms" in suspicion.look(slow, IN_A_ROW)
    assert suspicion.look(slow, IN_A_ROW) is None
    assert "rank 0" in suspicion.look(other, IN_A_ROW)
    assert compare([0.5]) == {}
    tiny = compare([0.0001, 0.0010])
    assert Suspicion().look(tiny, 10 * IN_A_ROW) is None  # ten times as slow, but who would notice


def record(*numbers: int) -> str:
    entries = [
        {"process_group": [str(group), ""], "collective_seq_id": number, "profiling_name": "gloo:all_reduce"}
        for group, newest in enumerate(numbers)
        for number in range(1, newest + 1)
    ]
    return json.dumps({"entries": entries})


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record(7), record(6), record(7)], "rank 1 did not come to all_reduce number 7"),
        ([record(7, 2), record(7, 2), record(7)], "rank 2 did not come to all_reduce number 1"),
        ([record(6), record(7), record(6)], "ranks 0 and 2 did not come to all_reduce number 7"),
        ([record(7), record(6), record(9)], "rank 1 did not come to all_reduce number 7"),
        ([record(7), record(7), record(7)], "all ranks are in the same collective, or in none"),
        ([record(7), None, record(7)], "rank 1 did not say where: stopped, gone, or on another disk"),
        ([record(7), '{"entr', record(7)], "what rank 1 recorded cannot be read"),
        ([record(), record(), record()], "all ranks are in the same collective, or in none"),
    ],
)
def test_who_is_missing(tmp_path, records, said):
    for rank, content in enumerate(records):
        if content:
            (tmp_path / f"rank_{rank}.json").write_text(content)
    assert flight.who_is_missing(tmp_path, 3) == said


def test_the_private_names_are_there():
    assert isinstance(flight.collectives(json.loads(c10d._dump_fr_trace_json())), dict)
    assert not dist.is_nccl_available() or callable(c10d._dump_nccl_trace_json)
    assert callable(nn.parallel.DistributedDataParallel._run_ddp_forward)
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)
    sides = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    assert [norm.item() for norm in torch._foreach_norm(sides)] == [5, 12]


def meet(store, ranks, patience=20.0):
    """The prefix on which each rank agreed, each in a thread."""
    found = {}

    def one(rank):
        mine = fresh(store, rank, ranks, patience)
        mine.set(f"rank/{rank}", "here")
        mine.wait([f"rank/{other}" for other in range(ranks)], timedelta(seconds=patience))
        found[rank] = mine

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * patience)
    return found


def test_each_start_meets_in_a_part_of_its_own():
    """The second finds everything in the store that the first left there."""
    store = dist.HashStore()
    first, second = meet(store, 3), meet(store, 3)
    assert first.keys() == second.keys() == {0, 1, 2}
    first[1].set("address", "of a dead process")
    assert first[2].get("address") == b"of a dead process"
    assert not second[2].check(["address"])
    second[0].set("address", "of rank 0")
    assert {mine.get("address") for mine in second.values()} == {b"of rank 0"}


def test_a_meeting_without_one_rank_ends():
    with pytest.raises(RuntimeError, match=r"Waited 0\.1 s for rank 1 to start, in vain"):
        fresh(dist.HashStore(), 0, 2, patience=0.1)
