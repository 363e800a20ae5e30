"""`launch` starts the training loop on a few ranks, warm; `read_rows` reads what it wrote."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from course_lib.launch.supervise import QUICK_FORK


@dataclass
class Launched:
    """A launch: process ids at once, exit codes and output after `wait`."""

    zygote: subprocess.Popen
    log: Path
    pids: list[int]
    codes: list[int] = field(default_factory=list)

    def wait(self) -> "Launched":
        if not self.codes:
            self.codes = json.loads(self.zygote.stdout.readline())["codes"]
        return self

    def output(self, rank: int = 0) -> str:
        return Path(f"{self.log}.{rank}").read_text()

    @property
    def everything(self) -> str:
        return "".join(self.output(rank) for rank in range(len(self.pids)))


@pytest.fixture(scope="session")
def zygote():
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, str(Path(__file__).with_name("zygote.py"))]
    env |= {**QUICK_FORK, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert json.loads(process.stdout.readline()) == {"ready": True}
        yield process
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="session")
def start(zygote, tmp_path_factory):
    """Function: start(words, ranks) -> Launched, still running. ranks=0 is one process without a launcher.

    With `restarts` a torchrun starts them; its process id and exit code are all that is known then.
    """

    running: list[Launched] = []

    def start(
        words: str | list[str],
        ranks: int = 2,
        before: str = "",
        cwd: Path | None = None,
        timeout=90,
        restarts: int | None = None,
    ):
        if running and not running[-1].codes:  # of a test that failed in between
            for pid in running[-1].pids:
                with contextlib.suppress(ProcessLookupError):  # that one has ended
                    os.kill(pid, signal.SIGKILL)
            running[-1].wait()
        folder = tmp_path_factory.mktemp("launch")
        words = words.split() if isinstance(words, str) else [str(word) for word in words]
        request = {"words": words, "ranks": ranks, "before": before, "log": str(folder / "log")}
        request |= {"cwd": str(cwd or folder), "timeout": timeout, "restarts": restarts}
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        running.append(Launched(zygote, folder / "log", json.loads(zygote.stdout.readline())["pids"]))
        return running[-1]

    return start


@pytest.fixture(scope="session")
def launch(start):
    """Function: as start, but waits until all ranks have ended."""

    def launch(*args, **kwargs) -> Launched:
        return start(*args, **kwargs).wait()

    return launch


@pytest.fixture(scope="session")
def read_rows():
    """Function: the rows of a run's metrics.jsonl of one kind ("train", "eval", "start")."""

    def read_rows(folder: Path, event: str) -> list[dict]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["event"] == event]

    return read_rows


@pytest.fixture(scope="session")
def read_status():
    """Function: what status.json says."""
    return lambda folder: json.loads((folder / "status.json").read_text())
