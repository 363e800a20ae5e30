"""Run a program under torchrun from a notebook: followed, interruptible, and gone when it is over."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from course_lib.launch.arguments import cwd as current_folder
from course_lib.launch.errors import RunInterrupted
from course_lib.launch.supervise import can_fork, exclusive

_VANISHED = 10.0  # seconds without a rank, longer than torchrun needs to start them again
_NEVER_SEEN = 30.0  # the same before the first one, who may have left before anybody looked


def torchrun(
    args: list[str],
    *,
    ranks: int,
    log: Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    on_tick: Callable[[], None] | None = None,
    timeout: float | None = None,
    grace: float = 30.0,
    start: str = "auto",
    restarts: int = 0,
    module: str | None = None,
) -> int:
    """Run `torchrun --standalone --nproc-per-node=RANKS ARGS` and return its exit code.

    args     what follows torchrun's own options: a script or `-m module`, and its arguments
    log      file that receives all output
    on_tick  called about five times a second in the calling thread
    timeout  seconds; then the program is stopped as below and TimeoutError is raised
    grace    on Ctrl-C or at the timeout torchrun gets SIGTERM, so that the ranks can save; after `grace` seconds,
             or at a second Ctrl-C, all are killed. Then RunInterrupted is raised.
    start    "fork": by a torchrun that has torch imported already, which saves seconds a rank; "torchrun": the plain
             command; "auto": fork on Linux without an NVIDIA driver
    restarts how often torchrun starts all ranks again when one has failed
    module   what forked ranks need of the course: imported once, before the fork

    Forked ranks that leave by os._exit are waited for by torchrun for ever. And torchrun itself never goes on when one
    is killed at the very end, in the moment in which it waits for torchrun to take its result. So when no rank has been
    there for 10 seconds, or none came within 30, or torchrun has left a dead one alone for 10, it is ended, and 1 is
    returned.
    """
    if start == "auto":
        start = "fork" if can_fork() and not Path("/dev/nvidiactl").exists() else "torchrun"
    argv = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    if start == "fork":
        argv += ["--local-addr", "127.0.0.1", "--run-path", "--start-method", "fork", "--log-dir", str(log.parent)]
        argv.append(str(Path(__file__).with_name("_program_main.py")))
    argv += args
    deadline = time.monotonic() + timeout if timeout else float("inf")
    with exclusive() as (current, interrupt):
        whole_env = {**os.environ, **(env or {})}
        current.start(start, argv=argv, module=module, log=log, env=whole_env, cwd=Path(cwd or current_folder()))
        ranks = _Ranks(current.agent)
        while current.poll(0.2) is None:
            if on_tick:
                on_tick()
            if start == "fork" and ranks.vanished():
                current.end()
                return 1
            late = time.monotonic() > deadline
            if interrupt.count or late:
                current.signal(signal.SIGTERM)
                kill_at = time.monotonic() + grace
                seen = interrupt.count
                while current.poll(0.1) is None and time.monotonic() < kill_at and interrupt.count == seen:
                    if on_tick:
                        on_tick()
                current.end()
                if late:
                    raise TimeoutError(f"The program was stopped after {timeout:.0f} s, the time given to it.")
                raise RunInterrupted("Interrupted: the program has ended.")
        if on_tick:
            on_tick()
        assert current.exit_code is not None
        return current.exit_code


class _Ranks:
    """The grandchildren of the agent: torchrun is its child, and they are torchrun's."""

    def __init__(self, agent: int) -> None:
        self.agent, self.looked = agent, time.monotonic()
        self.until = self.looked + _NEVER_SEEN
        self.reaped = self.looked  # when no dead one lay there

    def vanished(self) -> bool:
        """Whether none has been there for too long, or a dead one has. It looks every two seconds."""
        now = time.monotonic()
        if now - self.looked >= 2:
            self.looked = now
            dead = self._dead()
            if not all(dead):
                self.until = now + _VANISHED
            if not any(dead):
                self.reaped = now
        return now > min(self.until, self.reaped + _VANISHED)

    def _dead(self) -> list[bool]:
        """Of each rank that has a process, whether torchrun need only reap it."""
        try:
            family = [rank for child in psutil.Process(self.agent).children() for rank in child.children()]
            return [rank.status() == psutil.STATUS_ZOMBIE for rank in family]
        except psutil.NoSuchProcess:  # one of them has ended just now: look again later
            return [False]
