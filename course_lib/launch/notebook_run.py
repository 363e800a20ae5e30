"""`run`: call a function on N real ranks and give back what they returned, printed and sent."""

import json
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from course_lib.launch import diagnose, trace
from course_lib.launch.pickling import cell_names, cell_sources, pickle_call
from course_lib.launch.result import Result
from course_lib.launch.supervise import TAG, Interrupt, Supervisor, can_fork, exclusive

# Memory of a rank that is not shared with others. Idle ranks took 10 and 282 MB (`course bench launch --memory`);
# the rest is for what the function does.
NEED_MB = {"fork": 40, "torchrun": 320}
_QUIET = 2.0  # seconds without CPU time or progress after which ranks that all wait are a deadlock
_START_LIMIT = 120.0
_SHOWN = 1 << 20  # bytes of a rank's output that are printed while it runs
KEPT = 16 << 20  # bytes of a rank's output that Result.output keeps
_DISK = 2 << 30  # bytes of output at which a rank is stopped


class RunError(RuntimeError):
    """A run that failed or hung. The text names the culprit first, then tells what each rank did.

    culprit    the rank that failed first, or None for a hang
    messages   all calls of torch.distributed until then
    output     what each rank had printed
    """

    def __init__(self, text: str, *, culprit: int | None = None, messages=(), output=()) -> None:
        super().__init__(text)
        self.culprit, self.messages, self.output = culprit, list(messages), list(output)

    def _render_traceback_(self) -> list[str]:
        return ["", f"{type(self).__name__}: {self}"]


class RunInterrupted(KeyboardInterrupt):
    """The run was interrupted; all its processes have ended."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: tuple = (),
    timeout: float = 60,
    backend: str = "gloo",
    *,
    nodes: int = 1,
    start: str = "auto",
    watch: bool = True,
    quiet: bool = False,
) -> Result:
    """Call `fn(*args)` on `ranks` processes started by torchrun; the process group is up when it is called.

    fn       any function, also one from a notebook cell. What it returns comes back in `Result.results[rank]`.
    timeout  seconds for the function on all ranks. A run in which all ranks provably wait for each other ends
             after about 2 s.
    backend  "gloo" for CPU tensors, "nccl" for GPUs
    nodes    start the ranks by this many torchruns, as if each were another machine: the first gets the ranks
             0 to ranks/nodes - 1, and so on. (Here they all share this machine and its memory.)
    start    "fork": ranks are forked by a torchrun that has torch imported already (fast; Linux);
             "torchrun": a plain `torchrun` command (slow start; any system; needed for NCCL); "auto" chooses.
    watch    False: do not record messages (saves a few microseconds a call)
    quiet    True: do not print what the ranks print; it is in `Result.output`

    Raises RunError (a rank failed, or a hang), RunInterrupted (Ctrl-C), TypeError or ValueError (bad arguments).
    """
    start = _check(fn, ranks, args, timeout, backend, start, nodes)
    call = pickle_call(fn, args)
    with exclusive() as (current, interrupt):
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=current.folder))
        try:
            return _Run(current, interrupt, folder, ranks, timeout, quiet).go(call, backend, start, watch, nodes)
        finally:
            if current.alive():
                current.end()
            shutil.rmtree(folder, ignore_errors=True)


def _check(fn, ranks, args, timeout, backend, start, nodes) -> str:
    if not callable(fn):
        raise TypeError(f"run() needs a function to call on each rank, not a {type(fn).__name__}.")
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"ranks must be a whole number, not {ranks!r}.")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least one rank must run.")
    if not isinstance(nodes, int) or nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks do not spread evenly over nodes={nodes!r}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, such as args=({args!r},), not a {type(args).__name__}.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}.")
    if not 0 < timeout <= 1e6:
        raise ValueError(f"timeout={timeout}: give a positive number of seconds, at most a million.")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend={backend!r}: choose 'gloo' (CPU tensors) or 'nccl' (GPUs).")
    if TAG in os.environ and "RANK" in os.environ:
        raise RuntimeError("run() was called inside a rank of another run(): call it from the notebook or script only.")
    if start not in ("auto", "fork", "torchrun"):
        raise ValueError(f"start={start!r}: choose 'auto', 'fork' or 'torchrun'.")
    if start == "fork" and not can_fork():
        raise ValueError(f"start='fork' is not safe on {sys.platform}; use start='torchrun'.")
    if backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("backend='nccl' needs NVIDIA GPUs, and there is none here; use backend='gloo'.")
    if start == "auto":
        start = "fork" if can_fork() and backend == "gloo" else "torchrun"
    free = psutil.virtual_memory().available // 2**20
    if ranks * NEED_MB[start] > free:
        raise ValueError(
            f"{ranks} ranks need about {ranks * NEED_MB[start]} MB of memory (start={start!r}), and {free} MB "
            f"are free: at most {free // NEED_MB[start]} ranks can start here."
        )
    return start


class _Run:
    """One run, seen from the kernel."""

    def __init__(self, current: Supervisor, interrupt: Interrupt, folder: Path, ranks: int, timeout: float,
                 quiet: bool) -> None:  # fmt: skip
        self.current, self.interrupt, self.folder = current, interrupt, folder
        self.ranks, self.timeout, self.quiet = ranks, timeout, quiet
        self.readers = [trace.Reader(folder, k) for k in range(ranks)]
        self.processes: dict[int, psutil.Process] = {}
        self.exit_codes: dict[int, int | None] = {}
        self.shown = [0] * ranks
        self.calm_since, self.last_seen = time.monotonic(), None

    def go(self, call: bytes, backend: str, start: str, watch: bool, nodes: int) -> Result:
        (self.folder / "call.pickle").write_bytes(call)
        plan = {"backend": backend, "watch": watch, "cells": cell_names(), "sources": cell_sources()}
        plan["path"] = list(map(str, sys.path))
        plan["group_timeout"] = self.timeout + 60  # ours comes first: it can say who waits for whom
        (self.folder / "plan.json").write_text(json.dumps(plan))
        began = time.monotonic()
        for number, argv in enumerate(self.commands(nodes, start)):
            log = self.folder / f"torchrun_{number}.log"
            self.current.start(start, argv, log, env=_environment(), cwd=cwd())
        while True:
            ended = self.current.poll(0.005) is not None
            self.show()
            self.look_at_processes()
            states = [reader.header()[0] for reader in self.readers]
            if all(state == trace.RETURNED for state in states):
                return self.collect()
            if self.interrupt.count:
                self.stop_interrupted()
            if ended or self.exit_codes or trace.RAISED in states:
                self.settle()
                self.fail()
            self.check_time(began)

    def commands(self, nodes: int, start: str) -> list[list[str]]:
        """The arguments of torchrun, for each node."""
        common = ["--nproc-per-node", str(self.ranks // nodes), "--local-addr", "127.0.0.1"]
        common += ["--log-dir", str(self.folder / "torchrun")]
        if start == "fork":
            common += ["--run-path", "--start-method", "fork", "--monitor-interval", "0.02"]
        program = [str(Path(__file__).with_name("_rank_main.py")), str(self.folder)]
        if nodes == 1:
            return [["--standalone", *common, *program]]
        meet = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        return [[*meet, "--node-rank", str(node), *common, *program] for node in range(nodes)]

    def torchrun_log(self) -> str:
        """What the torchruns wrote."""
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("torchrun_*.log")))

    def look_at_processes(self) -> None:
        """Note which ranks have died, and how, before torchrun reaps them."""
        for rank in range(self.ranks):
            if rank in self.exit_codes:
                continue
            try:
                if rank not in self.processes:
                    pid = self.folder / f"rank_{rank}.pid"
                    if pid.exists():
                        self.processes[rank] = psutil.Process(int(pid.read_text()))
                    continue
                if self.processes[rank].status() == psutil.STATUS_ZOMBIE:
                    self.exit_codes[rank] = _zombie_code(self.processes[rank].pid)
            except psutil.NoSuchProcess:
                if not (self.folder / f"rank_{rank}.end").exists():
                    self.exit_codes[rank] = None
        for rank in [k for k in self.exit_codes if (self.folder / f"rank_{k}.end").exists()]:
            del self.exit_codes[rank]  # it had finished

    def check_time(self, began: float) -> None:
        """Raise when the time is up, or as soon as it is clear that nobody will ever move."""
        now = time.monotonic()
        begins = [reader.header()[5] for reader in self.readers]
        if not all(begins):
            if now - began > _START_LIMIT:
                self.fail(f"the ranks had not started after {_START_LIMIT:.0f} s")
            return
        if now - max(begins) > self.timeout:
            self.ask_stacks()
            self.fail(f"not finished after {self.timeout:g} s")
        if now - self.calm_since > 0.25 and not self.moving():
            if now - self.calm_since > _QUIET:
                self.fail("deadlock: all ranks wait, and nothing can wake them")
        elif now - self.calm_since > 0.25:
            self.calm_since = now

    def moving(self) -> bool:
        """False when every rank that has not returned sleeps in a call of torch.distributed without progress."""
        seen = []
        for rank, reader in enumerate(self.readers):
            state, calls, _, blocked, _, _, _ = reader.header()
            if state == trace.RETURNED:
                continue
            if state != trace.RUNNING or blocked < 0 or rank not in self.processes:
                self.last_seen = None
                return True
            try:
                times = self.processes[rank].cpu_times()
                asleep = self.processes[rank].status() == psutil.STATUS_SLEEPING
            except psutil.NoSuchProcess:
                return True
            seen.append((rank, calls, blocked, times.user + times.system, asleep))
        before, self.last_seen = self.last_seen, self.last_seen or seen
        still = before is not None and len(before) == len(seen) and all(
            a[:3] == b[:3] and b[3] - a[3] <= 0.021 and b[4] for a, b in zip(before, seen, strict=True)
        )  # at most two clock ticks  # fmt: skip
        if not still:
            self.last_seen = seen
        return not still

    def settle(self) -> None:
        """Give the other ranks a moment to fail, finish or block, so that each line tells the truth."""
        limit = time.monotonic() + 0.5
        while time.monotonic() < limit:
            self.current.poll(0.01)
            self.look_at_processes()
            headers = [reader.header() for reader in self.readers]
            calm = [h[0] in (trace.RETURNED, trace.RAISED) or h[3] >= 0 for h in headers]
            if all(calm[k] or k in self.exit_codes for k in range(self.ranks)):
                break
        self.ask_stacks()

    def ask_stacks(self) -> None:
        """Let each living rank write where it is."""
        for rank, process in self.processes.items():
            path = self.folder / f"rank_{rank}.stack"
            if rank in self.exit_codes or not path.exists():  # handlers are set once the file is there
                continue
            try:
                process.send_signal(signal.SIGUSR1)
            except psutil.NoSuchProcess:
                continue
        self.current.poll(0.05)
        time.sleep(0.05)

    def show(self, last: bool = False) -> None:
        """Print the whole lines that the ranks have written since the last look."""
        for rank in range(self.ranks):
            path = self.folder / f"rank_{rank}.out"
            if not path.exists() or path.stat().st_size == self.shown[rank]:
                continue
            if path.stat().st_size > _DISK:
                self.fail(f"rank {rank} has printed more than {_DISK >> 30} GB")
            if self.quiet or self.shown[rank] >= _SHOWN:
                continue
            with path.open("rb") as file:
                file.seek(self.shown[rank])
                data = file.read(_SHOWN - self.shown[rank])
            if not last:
                data = data[: data.rfind(b"\n") + 1]
            self.shown[rank] += len(data)
            for line in data.decode(errors="replace").removesuffix("\n").split("\n"):
                print(f"[rank {rank}] {line.rsplit(chr(13), 1)[-1]}")  # a progress bar: what stands at last
            if self.shown[rank] >= _SHOWN:
                print(f"[rank {rank}] … more than {_SHOWN >> 20} MB: the rest is in .output[{rank}] only")

    def output(self) -> list[str]:
        """What each rank printed; the middle of a very long output is cut."""
        texts = []
        for rank in range(self.ranks):
            path = self.folder / f"rank_{rank}.out"
            size = path.stat().st_size if path.exists() else 0
            if size <= KEPT:
                texts.append(path.read_bytes().decode(errors="replace") if size else "")
                continue
            with path.open("rb") as file:
                head = file.read(KEPT // 2).decode(errors="replace")
                file.seek(-KEPT // 2, os.SEEK_END)
                tail = file.read().decode(errors="replace")
            texts.append(f"{head}\n… {(size - KEPT) >> 20} MB left out …\n{tail}")
        return texts

    def messages(self) -> list:
        begins = [header[5] for reader in self.readers if (header := reader.header())[5]]
        zero = min(begins, default=0.0)
        found = [message for reader in self.readers for message in reader.messages(zero)]
        if dropped := sum(reader.header()[2] for reader in self.readers):
            print(f"(only the first {trace.CAPACITY} calls of a rank are recorded: {dropped} are not in .messages)")
        return sorted(found, key=lambda message: message.start)

    def collect(self) -> Result:
        self.show(last=True)
        seconds = max(header[6] - header[5] for header in (reader.header() for reader in self.readers))
        values = [pickle.loads((self.folder / f"rank_{k}.value").read_bytes()) for k in range(self.ranks)]
        result = Result(values, self.output(), self.messages(), seconds)
        self.current.end()  # all values are here: nothing is gained by waiting for each process's own clean end
        for reader in self.readers:
            reader.close()
        return result

    def states(self) -> list[diagnose.RankState]:
        # the local rank is the rank on one node only; with several we do without torchrun's word
        text = self.torchrun_log() if not (self.folder / "torchrun_1.log").exists() else ""
        for code, rank in re.findall(r"exitcode: (-?\d+)\) local_rank: (\d+)", text):
            if self.exit_codes.get(int(rank)) is None and not (self.folder / f"rank_{rank}.end").exists():
                self.exit_codes[int(rank)] = int(code)
        return diagnose.read_states(self.folder, self.readers, self.exit_codes)

    def stop_interrupted(self) -> None:
        self.ask_stacks()
        lines = [f"rank {state.rank} {state.words()}" for state in self.states()]
        self.current.end()
        raise RunInterrupted("Interrupted: all ranks have been stopped.\n" + "\n".join(lines))

    def fail(self, headline: str | None = None) -> None:
        """End the run and raise what the learner should read."""
        states, messages = self.states(), self.messages()
        self.current.end()
        self.show(last=True)
        guilty = None if headline else diagnose.culprit(states)
        lines = []
        if headline:
            lines = [headline, "", diagnose.explain_hang(states, messages)]
        elif guilty and guilty.error:
            lines = [f"rank {guilty.rank} failed: {guilty.error['type']}: {guilty.error['message']}", ""]
            for frame in guilty.error["frames"]:
                lines += [f"  {frame['where']}, in {frame['function']}", f"      {frame['text']}"]
            lines += [f"  {cause}" for cause in guilty.error["causes"]]
        elif guilty:
            lines = [f"rank {guilty.rank} {guilty.death()}"]
        else:
            lines = [self.start_failure(states)]
        if told := diagnose.mismatch(states):
            lines = [lines[0], "", told] if headline else [*lines, "", told]
        others = [f"rank {s.rank}: {s.words()}" for s in states if s is not guilty]
        text = "\n".join([*lines, "", *others])
        output = self.output()
        if guilty and not guilty.error and (said := _last_words(output[guilty.rank])):
            text += f"\n\nrank {guilty.rank}'s last words: {said}"
        raise RunError(text, culprit=guilty.rank if guilty else None, messages=messages, output=output)

    def start_failure(self, states: list[diagnose.RankState]) -> str:
        lost = [s for s in states if s.victim]
        if lost:
            return f"rank {lost[0].rank} failed: {lost[0].error['type']}: {lost[0].error['message']}"
        tail = self.torchrun_log().strip().splitlines()[-12:]
        return "torchrun ended before the ranks did:\n" + "\n".join(tail)


def _last_words(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    """Ours, without torchrun's own options (PET_*), which would change what was asked for."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def cwd() -> Path:
    """The current folder. Raises ValueError with a sentence when it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ValueError("The current folder of this notebook has been deleted; change to another.") from None


def _zombie_code(pid: int) -> int | None:
    """Exit code of a process that has ended and is not reaped yet: the last field of /proc/PID/stat."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rsplit(" ", 1)[1])
    except (OSError, ValueError):
        return None
    return os.waitstatus_to_exitcode(status)
