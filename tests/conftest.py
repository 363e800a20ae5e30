"""What all tests share: who runs where, and the two things that a test run must not leave behind.

A run leaves no process, and in CI no change in the tree; either makes the whole run fail.
"""

import gc
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from zlib import crc32

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
TAG = "COURSE_TEST_RUN"  # in the environment of every process that a test starts
BEFORE = pytest.StashKey[str]()
LONGEST = {"test_notebooks.py", "test_browser.py", "test_project_whole.py"}
NOTEBOOK = "test_runs_without_an_error_and_leaves_no_process["  # of test_notebooks.py: one for each notebook


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def processes_with():
    """Function: the processes with NAME=value in their environment, once they are none or the patience is over.

    `most`: how many may stay, for which nobody waits.
    """
    return _processes_with


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[TAG] = uuid.uuid4().hex  # xdist's workers inherit it
    gc.disable()  # while torch and all tests are imported: what comes stays
    # jsonschema, which nbformat needs, would build a grammar for 3 s: to check a format that no notebook has
    sys.modules["rfc3987_syntax"] = None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with what takes long on one worker, and then with the files that take long."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path not in slow))


@pytest.hookimpl(optionalhook=True)  # also when xdist is switched off: -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Keep together on one worker what shares warm processes: a file, half of the notebooks, half of tests/train.

    (xdist's own --dist loadgroup does not group: version 3.8 renames tests in a way that pytest 9.2 does not see.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, name = nodeid.partition("::")
            if name.startswith(NOTEBOOK):  # one kernel; by the lesson's number
                number = int(re.search(r"/(\d\d)_", name)[1])
                return f"notebooks {number % 2}"
            if file.startswith("tests/train/"):  # one process that has imported torch, see tests/train/conftest.py
                return f"tests/train {crc32(file.encode()) % 2}"
            return file

    return ByFile(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = _changes()


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if launch := sys.modules.get("course_lib.launch"):
        launch.shutdown()  # without xdist its agent is ours, and ends only with us
    faults = [f"left running: {line}" for line in _processes_with(TAG, os.environ[TAG])]
    if os.environ.get("CI") and _changes() != session.config.stash[BEFORE]:
        faults.append(f"the tests changed the tree:\n{_changes()}")
    if faults:
        print("\nERROR " + "\nERROR ".join(faults))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _changes() -> str:
    done = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout


def _processes_with(name: str, value: str, patience: float = 10, most: int = 0) -> list[str]:
    end = time.monotonic() + patience
    while True:
        left = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(name) == value:
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except (psutil.Error, OSError):  # gone meanwhile, or another user's
                continue
        if len(left) <= most or time.monotonic() > end:
            return left
        time.sleep(0.1)
