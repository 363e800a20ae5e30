"""The helper process of a kernel: starts torchrun, warm where that is safe, and leaves nothing behind.

It speaks JSON lines over a socket with the one who started it:
in   {"do": "start", "start": "fork" | "torchrun", "argv": [...], "module": "course_lib.…" | None, "env": {...}, ...}
     {"do": "start", "start": "direct", "ranks": 4, "folder": ..., "module": "course_lib.…" | None, "env": ..., ...}
     {"do": "signal", "number": 15}     {"do": "kill"}
out  {"event": "ready"}     {"event": "exit", "code": 1, "rank": None}     {"event": "gone"}
The end of the socket means that the kernel is gone: then everything dies.
"""

import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module

import psutil

from course_lib.launch.dying import adopt_orphans, die_with_parent
from course_lib.launch.huge_pages import huge_pages
from course_lib.startup import importing

# After so many forks the next ones are made cheap, and about twenty of them save what that costs; later again, for new
# modules.
_MANY = (8, 32, 128)


def warm_up() -> None:
    """Import what every rank needs: enough for a direct start, so that a first check need not wait longer."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs must not initialise CUDA here
    with importing():  # forks neither scan nor copy what is frozen here
        import torch

        import course_lib.launch.rank  # noqa: F401

    torch.set_num_threads(1)
    # torch looks for process groups of other makers, in each rank and for each group, in all that is installed
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    importlib.metadata.entry_points(group="torch.distributed.backends")


def warm_up_fully() -> None:
    """Import torchrun, and `_dynamo`, which the first optimizer of a rank would pull in. As long again as `warm_up`."""
    if "torch.distributed.run" in sys.modules:
        return
    with importing():
        import torch._dynamo.trace_rules
        import torch.distributed.run
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = _caller
    torch._dynamo.trace_rules.clear_lru_cache()  # each rank will do it in init_process_group, object by object


def _caller(depth: int = 2) -> str:
    """The function's name `depth` frames up, by which torchrun's rendezvous calls its events.

    As torch's own, which reads the source of all frames for it, by a look at all modules for each: more than half of
    what a forked torchrun had to do.
    """
    return sys._getframe(depth).f_code.co_name


class Agent:
    """One run at a time: its torchruns and all that descends from them."""

    def __init__(self, channel: socket.socket, folder: str, warm: bool) -> None:
        self.channel, self.folder, self.warm = channel, folder, warm
        self.parent = os.getppid()
        self.jobs: set[int] = set()  # a torchrun for each node
        self.ranks: dict[int, int] = {}  # process: rank, of a direct start
        self.busy = False  # a job was started and its last process is not gone yet
        self.buffer = b""
        self.forks = 0
        self.packing: Iterator[int] | None = None

    def say(self, **event) -> None:
        self.channel.sendall(json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        """Work until the kernel goes away."""
        self.say(event="ready")
        while os.getppid() == self.parent:
            readable, _, _ = select.select([self.channel], [], [], self.patience())
            if readable:
                data = self.channel.recv(1 << 20)
                if not data:
                    return
                *lines, self.buffer = (self.buffer + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
            if self.busy:
                self.look()
            elif self.packing and not readable:
                if next(self.packing, None) is None:
                    self.packing = None
            elif self.warm and not readable:
                warm_up_fully()

    def patience(self) -> float:
        """Seconds to wait for an order, before there is something else to do."""
        if self.busy:
            return 0.01
        return 0.0 if self.packing else 1.0

    def obey(self, order: dict) -> None:
        if order["do"] == "start":
            self.busy = True
            self.start(order)
        elif order["do"] == "signal":
            for job in self.jobs:
                os.kill(job, order["number"])
        elif order["do"] == "kill" and self.busy:
            self.end_all()

    def start(self, order: dict) -> None:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            module = order.get("module")  # of the course: imported once here, not in each rank
            if module and order["start"] != "torchrun":
                import_module(module)
                gc.freeze()
            if order["start"] == "direct":
                for rank in range(order["ranks"]):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(order["ranks"])}
                    self.ranks[self.fork({**order, "env": order["env"] | place}, log, _rank)] = rank
            elif order["start"] == "fork":
                warm_up_fully()
                self.jobs.add(self.fork(order, log, _torchrun))
            else:
                self.jobs.add(self.fresh(order, log))
        finally:
            os.close(log)

    def fresh(self, order: dict, log: int) -> int:
        """A plain torchrun."""
        me = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *order["argv"]],
            env=order["env"], cwd=order["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), die_with_parent(me)),
        )  # fmt: skip
        process.returncode = 0  # we reap it ourselves
        return process.pid

    def fork(self, order: dict, log: int, work: Callable[[dict], None]) -> int:
        """A child that does `work`, with torch already imported."""
        me = os.getpid()
        self.forks += 1
        if self.forks in _MANY:
            self.packing = huge_pages()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            die_with_parent(me)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.channel.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(order["cwd"])
            for name in os.environ.keys() - order["env"].keys():
                del os.environ[name]
            os.environ.update(set(order["env"].items()) - set(os.environ.items()))
            sys.path[:] = order["path"]
            work(order)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001 - whatever torchrun raises belongs into its log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def look(self) -> None:
        """Reap what has ended; when a torchrun has, end what is left of the run.

        A direct start has no torchrun that waits for all: there the first rank that leaves is news, and the kernel's
        side decides when the others have had their say.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid, status = 0, 0
            if pid == 0:
                return
            if pid in self.jobs:
                self.say(event="exit", code=os.waitstatus_to_exitcode(status), rank=None)
                self.end_all()
                return
            if pid in self.ranks:
                self.say(event="exit", code=os.waitstatus_to_exitcode(status), rank=self.ranks.pop(pid))

    def end_all(self) -> None:
        """Kill until there is no child: orphans become ours, so none can escape."""
        self.jobs.clear()
        self.ranks.clear()
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            for process in psutil.Process().children(recursive=True):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                break
            time.sleep(0.002)
        if self.busy:
            self.busy = False
            self.say(event="gone")


def _torchrun(order: dict) -> None:
    from torch.distributed.run import main

    main(order["argv"])


def _rank(order: dict) -> None:
    from course_lib.launch.rank import main

    main(order["folder"])


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    folder, warm = sys.argv[2], sys.argv[3] == "warm"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the kernel, which then tells us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    agent, kernel_gone = Agent(channel, folder, warm), False
    try:
        if warm:
            warm_up()
        agent.serve()
        kernel_gone = True
    except (BrokenPipeError, ConnectionResetError):
        kernel_gone = True
    finally:
        agent.busy = False
        agent.end_all()
        if kernel_gone or os.getppid() != agent.parent:
            shutil.rmtree(folder, ignore_errors=True)  # a kernel that is killed while it ends does not come to that


if __name__ == "__main__":
    with contextlib.suppress(SystemExit):
        main()
    os._exit(0)  # nothing is left to be done, and taking torch apart would take half a second
