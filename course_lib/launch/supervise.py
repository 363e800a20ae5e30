"""The kernel's side of the agent: one job at a time, interruptible, and gone when it is over."""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from course_lib.launch.errors import wrapped
from course_lib.startup import quick_exit

TAG = "COURSE_LIB_OWNER"  # every process that we start carries it; the last sweep looks for it
_WARM_LIMIT = 180.0  # seconds for the agent to import torch, on a slow and busy disk
_GONE_LIMIT = 30.0
# For the agent: memory in huge pages. A fork copies the page table of some 300 MB, and each rank that touches a page
# gets its own copy of it; this way both take about a third less. (Other systems than glibc's ignore it.)
QUICK_FORK = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class AgentDied(RuntimeError):
    """The helper process was killed from outside; its runs have been swept away."""

    def _render_traceback_(self) -> list[str]:
        return ["", wrapped(str(self))]


class Supervisor:
    """Owns the agent process of this process. Use `supervisor()` to get it."""

    def __init__(self, warm: bool) -> None:
        self.warm = warm
        self.owner = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.folder = Path(tempfile.mkdtemp(prefix="course-"))
        self.pid = os.getpid()
        self.ready = False
        self.exit_code: int | None = None
        self.rank_codes: dict[int, int] = {}  # of the ranks of a direct start that have left
        self.gone = True
        self.interrupt: Interrupt | None = None  # of the job that runs now
        self._buffer = b""
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._log = (self.folder / "agent.log").open("ab")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "course_lib.launch.agent", str(theirs.fileno()), str(self.folder),
                 "warm" if warm else "cold"],
                pass_fds=[theirs.fileno()], process_group=0, stdin=subprocess.DEVNULL,
                stdout=self._log, stderr=self._log, cwd=Path(__file__).parents[2],
                env={**os.environ, **(QUICK_FORK if warm else {}), TAG: self.owner,
                     "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )  # fmt: skip

    def alive(self) -> bool:
        """The agent still runs and belongs to this process (not to the one that we were forked from)."""
        return self.pid == os.getpid() and self._process.poll() is None

    @property
    def agent(self) -> int:
        """The process id of the agent: the parent of the torchrun that it has started."""
        return self._process.pid

    def start(self, way: str, *, log: Path, env: dict[str, str], cwd: Path, **order: object) -> None:
        """Start a torchrun (with `argv`), or several for one run if there are nodes; or ranks without torchrun.

        way  "fork": torchrun from the warm agent; "torchrun": a fresh process; "direct": `ranks` of `folder`
        """
        self._await(lambda: self.ready, _WARM_LIMIT, "import torch", interruptible=True)
        env = {**env, TAG: self.owner}
        env.setdefault("OMP_NUM_THREADS", "1")
        order |= {"do": "start", "start": way, "env": env, "cwd": str(cwd), "log": str(log)}
        order["path"] = list(map(str, sys.path))
        self.exit_code, self.gone = None, False
        self.rank_codes.clear()
        self._send(order)

    def poll(self, seconds: float) -> int | None:
        """Wait at most `seconds` for news; returns torchrun's exit code (direct start: a rank's) once it has ended."""
        if select.select([self._channel], [], [], seconds)[0]:
            try:
                data = self._channel.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                self._died()
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self.ready = self.ready or event["event"] == "ready"
                self.gone = self.gone or event["event"] == "gone"
                if event["event"] == "exit":
                    self.exit_code = event["code"]
                    if event["rank"] is not None:
                        self.rank_codes[event["rank"]] = event["code"]
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to torchrun itself."""
        self._send({"do": "signal", "number": int(number)})

    def end(self) -> None:
        """Kill the job and wait until its last process has gone."""
        if not self.gone:
            self._send({"do": "kill"})
            self._await(lambda: self.gone, _GONE_LIMIT, "end the run")

    def _send(self, order: dict) -> None:
        try:
            self._channel.sendall(json.dumps(order).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._died()

    def _await(self, done: Callable[[], bool], limit: float, what: str, interruptible: bool = False) -> None:
        deadline = time.monotonic() + limit
        while not done():
            if interruptible and self.interrupt and self.interrupt.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(
                    f"The helper process did not {what} within {limit:.0f} s; it was ended. Try again, "
                    "and see whether the machine is out of memory or very busy."
                )
            self.poll(0.05)

    def _died(self) -> None:
        log = (self.folder / "agent.log").read_text(errors="replace").strip()
        self.close()
        last = f" Its last words: {log.splitlines()[-1]}" if log else ""
        raise AgentDied(
            "The helper process that starts the ranks was killed from outside (by hand, or because the "
            f"machine ran out of memory). All its ranks were ended; run the cell again.{last}"
        )

    def close(self) -> None:
        """End the agent and all that it started."""
        if self.pid != os.getpid():
            return
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self.gone = True
        sweep(self.owner)
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep(owner: str) -> int:
    """Kill what still carries our tag; returns how many there were."""
    found = 0
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(TAG) == owner:
                process.kill()
                found += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


# %autoreload runs this module again: the agent that there is stays ours
_lock = globals().get("_lock") or threading.RLock()
_current: Supervisor | None = globals().get("_current")


def can_fork() -> bool:
    """Forked ranks are safe on Linux only."""
    return sys.platform == "linux"


def supervisor() -> Supervisor:
    """The supervisor of this process, started when there is none."""
    global _current
    with _lock:
        if _current is None or not _current.alive():
            if _current is not None and _current.pid == os.getpid():
                _current.close()
            _current = Supervisor(warm=can_fork())
            atexit.register(_current.close)
        return _current


def prewarm() -> None:
    """Called when a notebook imports course_lib: torch's import then runs while the learner reads."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores make everything slow, here as well
    supervisor()
    quick_exit()


def scratch() -> Path:
    """A folder for passing files; it goes with this process, however that ends."""
    return supervisor().folder


def shutdown() -> None:
    """End the agent now, as the end of this process would."""
    with _lock:
        if _current is not None and _current.pid == os.getpid():
            _current.close()


class Interrupt:
    """Whether Ctrl-C (the kernel's interrupt) has come, and how often."""

    count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@contextmanager
def exclusive() -> Iterator[tuple[Supervisor, Interrupt]]:
    """One job: the supervisor, and an interrupt that is a flag, so that cleaning up cannot be interrupted."""
    if not _lock.acquire(timeout=1.0):
        raise RuntimeError("Another run of this notebook is still going on; wait for it or interrupt it.")
    interrupt = Interrupt()
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if main else None
    try:
        current = supervisor()
        current.interrupt = interrupt
        try:
            yield current, interrupt
        finally:
            if current.alive():
                current.end()
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
        _lock.release()
