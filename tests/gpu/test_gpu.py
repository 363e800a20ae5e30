"""The loop on the GPUs that are visible here, a rank each, by NCCL. Without a GPU all of it is skipped.

CUDA must not be initialised before a fork, so everything starts by plain torchrun.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not GPUS, reason="torch sees no GPU here")]
SMALL = "--data.global_batch 0 --data.batch 24 --optim.epochs 6 --optim.warmup_epochs 1 --model.norm batch"


def torchrun(*words: str, ranks: int, cwd: Path) -> SimpleNamespace:
    """Exit code and everything that was printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=170)
    return SimpleNamespace(code=done.returncode, text=done.stdout + done.stderr)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Function: a finished run on all GPUs with these options, made once."""
    runs: dict[str, SimpleNamespace] = {}

    def trained(options: str) -> SimpleNamespace:
        if options not in runs:
            folder = tmp_path_factory.mktemp("gpu")
            words = f"-m course_lib.train digits {SMALL} {options} --run.dir run".split()
            done = torchrun(*words, ranks=GPUS, cwd=folder)
            assert done.code == 0, done.text
            rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
            config = json.loads((folder / "run/config.json").read_text())
            accuracy = [row["accuracy"] for row in rows if row["event"] == "eval"][-1]
            train = [row for row in rows if row["event"] == "train"]
            runs[options] = SimpleNamespace(folder=folder, config=config, train=train, accuracy=accuracy)
        return runs[options]

    return trained


def test_all_gpus_by_nccl(trained):
    done = trained("")
    assert (done.config["backend"], done.config["device"], done.config["ranks"]) == ("nccl", "cuda", GPUS)
    assert done.accuracy > 0.95


@pytest.mark.parametrize(
    "options",
    ["--amp.dtype bf16", "--amp.dtype fp16", "--model.channels_last", "--model.compile inductor",
     "--model.sync_batchnorm", "--ddp.comm_hook fp16", "--optim.zero"],
)  # fmt: skip
def test_equal_in_quality(trained, options):
    """The first loss is that of the same weights on the same samples; the accuracy is near that of float32."""
    plain, other = trained(""), trained(options)
    assert other.train[0]["loss"] == pytest.approx(plain.train[0]["loss"], rel=0.02)
    assert other.accuracy == pytest.approx(plain.accuracy, abs=0.03)


def test_memory_is_that_of_the_device(trained):
    """More than weights, gradients and momentum, less than the card has."""
    done = trained("")
    least, most = 3 * 4 * done.config["parameters"], torch.cuda.get_device_properties(0).total_memory
    assert all(least < row["memory_mib"] * 2**20 < most for row in done.train)


def test_a_stopped_run_goes_on(trained):
    """In the middle of an epoch: the steps go on where they were, and it learns as well."""
    done = trained("")
    words = f"-m course_lib.train digits {SMALL} --run.dir halves".split()
    torchrun(*words, "--run.stop_after", "10", ranks=GPUS, cwd=done.folder)
    again = torchrun(*words, ranks=GPUS, cwd=done.folder)
    assert again.code == 0, again.text
    rows = [json.loads(line) for line in (done.folder / "halves/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "train"] == [row["step"] for row in done.train]
    assert [row["accuracy"] for row in rows if row["event"] == "eval"][-1] == pytest.approx(done.accuracy, abs=0.03)


def test_two_ranks_do_not_share_a_gpu(tmp_path):
    done = torchrun(*["-m", "course_lib.train", "digits"], ranks=GPUS + 1, cwd=tmp_path)
    assert done.code == 1  # torchrun's, for its rank's 2
    assert f"This node has {GPUS} GPUs and {GPUS + 1} ranks, and two ranks cannot share a GPU with NCCL" in done.text
    assert not (tmp_path / "runs").exists()


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.full((5,), float(dist.get_rank() + 1), device="cuda:0")
dist.all_reduce(mine)
print("sum", mine.device.type, mine.tolist(), flush=True)
dist.destroy_process_group()
"""


def test_gloo_takes_cuda_tensors(tmp_path):
    """Also two ranks on one GPU: gloo copies through the host."""
    (tmp_path / "gloo.py").write_text(GLOO)
    done = torchrun("gloo.py", ranks=2, cwd=tmp_path)
    assert done.code == 0, done.text
    assert done.text.count("sum cuda [3.0, 3.0, 3.0, 3.0, 3.0]") == 2
