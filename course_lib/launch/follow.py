"""Follow the ranks of a run from outside: alive, moving, waiting, dead?"""

import os
import re
import signal
import time
from pathlib import Path

import psutil

from course_lib.launch import diagnose, trace
from course_lib.launch.supervise import Supervisor

_QUIET = 2.0  # seconds without CPU time or progress after which ranks that all wait are a deadlock
_LOOK = 0.05  # seconds between two looks at all threads of all ranks
_STARVED = 0.5  # seconds that a thread wants a core and gets none; gloo's wake up often, for less than a millisecond
_ENDED = re.compile(r"exitcode: (-?\d+)\) local_rank: (\d+)")  # in torchrun's log


class Ranks:
    """The processes of one run, and what their traces say."""

    def __init__(self, folder: Path, ranks: int, current: Supervisor) -> None:
        self.folder, self.current, self.numbers = folder, current, range(ranks)
        self.readers = [trace.Reader(folder, k) for k in self.numbers]
        self.processes: dict[int, psutil.Process] = {}
        self.exit_codes: dict[int, int | None] = {}
        self._calm_since, self._looked, self._last_seen = time.monotonic(), 0.0, None
        self._calls: list | None = None  # in which each rank stood when it was last looked at, and since when
        self._calls_since = time.monotonic()
        self._runnable: dict[str, float] = {}  # threads that have wanted a core at each look, and since when

    def headers(self) -> list[trace.Header]:
        """What each rank says of itself now."""
        return [reader.header() for reader in self.readers]

    def finished(self, rank: int) -> bool:
        """The rank has handed over its value."""
        return (self.folder / f"rank_{rank}.end").exists()

    def look(self) -> None:
        """Note which ranks have died, and how, before torchrun reaps them."""
        self.exit_codes.update(self.current.rank_codes)
        for rank in self.numbers:
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
                self.exit_codes[rank] = None
        self.exit_codes = {k: code for k, code in self.exit_codes.items() if not self.finished(k)}

    def deadlocked(self) -> bool:
        """It is clear that nobody will ever move: all ranks have slept in calls of torch.distributed for a while."""
        now = time.monotonic()
        if now - self._calm_since <= 0.25 or now - self._looked < _LOOK:
            return False
        self._looked = now
        if self._moving():
            self._calm_since = now
        return now - self._calm_since > _QUIET

    def stuck(self) -> bool:
        """When the time is up: no rank has entered or left a call for a while, and all wait in one.

        A busy machine may hide that from `deadlocked`, which wants to see them all asleep.
        """
        return self._calls is not None and time.monotonic() - self._calls_since > _QUIET

    def _moving(self) -> bool:
        """False when every rank that has not returned sleeps in a call of torch.distributed without progress."""
        seen = []
        for rank, header in enumerate(self.headers()):
            if header.state == trace.RETURNED:
                continue
            # a rank with threads of its own may yet be helped by one of them
            if header.state != trace.RUNNING or header.row < 0 or header.threads > 1 or rank not in self.processes:
                self._last_seen = self._calls = None
                return True
            try:
                times = self.processes[rank].cpu_times()
                threads = self.processes[rank].num_threads()
                asleep = self.processes[rank].status() == psutil.STATUS_SLEEPING
                asleep = asleep and not self._starved(self.processes[rank].pid)
            except psutil.NoSuchProcess:
                return True
            seen.append((rank, header.calls, header.row, times.user + times.system, asleep, threads))
        calls = [row[:3] for row in seen]
        if calls != self._calls:
            self._calls, self._calls_since = calls, time.monotonic()
        before, self._last_seen = self._last_seen, self._last_seen or seen
        still = before is not None and len(before) == len(seen) and all(
            a[:3] == b[:3] and b[3] - a[3] <= _idle(b[5]) and b[4] for a, b in zip(before, seen, strict=True)
        )  # fmt: skip
        if not still:
            self._last_seen = seen
        return not still

    def _starved(self, pid: int) -> bool:
        """A thread of the rank, perhaps one of gloo's, has wanted a core for a while: the machine is busy."""
        now, tasks = time.monotonic(), Path(f"/proc/{pid}/task")  # on other systems there is no such folder
        for stat in tasks.glob("*/stat"):
            try:
                runnable = stat.read_text().rpartition(")")[2].split()[0] == "R"
            except OSError:  # the thread has ended
                runnable = False
            if not runnable:
                self._runnable.pop(stat.parent.name, None)
            elif now - self._runnable.setdefault(stat.parent.name, now) > _STARVED:
                return True
        return False

    def settle(self) -> None:
        """Give the other ranks a moment to fail, finish or block, so that each line tells the truth."""
        limit = time.monotonic() + 0.5
        while time.monotonic() < limit:
            self.current.poll(0.01)
            self.look()
            calm = [h.state in (trace.RETURNED, trace.RAISED) or h.row >= 0 for h in self.headers()]
            if all(calm[k] or k in self.exit_codes for k in self.numbers):
                break
        self.ask_stacks()
        # torchrun has reaped a rank before we looked: it says how that one ended, in the last lines of its log
        limit = time.monotonic() + 3
        while None in self.exit_codes.values() and self.current.exit_code is None and time.monotonic() < limit:
            self.current.poll(0.02)
            self.look()
        if self.current.exit_code is None:  # torchrun goes on, so for it that rank has ended well
            self.exit_codes = {rank: code or 0 for rank, code in self.exit_codes.items()}

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

    def states(self) -> list[diagnose.RankState]:
        """What became of each rank."""
        # the local rank is the rank on one node only; with several we do without torchrun's word
        log = self.torchrun_log() if not (self.folder / "torchrun_1.log").exists() else ""
        for code, rank in _ENDED.findall(log):
            if self.exit_codes.get(int(rank)) is None and not self.finished(int(rank)):
                self.exit_codes[int(rank)] = int(code)
        return diagnose.read_states(self.folder, self.readers, self.exit_codes)

    def torchrun_log(self) -> str:
        """What the torchruns wrote."""
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("torchrun_*.log")))

    def zero(self) -> float:
        """The moment of time.monotonic() from which the times of messages count: the first rank began."""
        return min((header.begin for header in self.headers() if header.begin), default=0.0)

    def messages(self) -> list:
        """All calls of torch.distributed, by start time."""
        zero = self.zero()
        found = [message for reader in self.readers for message in reader.messages(zero)]
        if dropped := sum(header.dropped for header in self.headers()):
            print(f"(only the first {trace.CAPACITY} calls of a rank are recorded: {dropped} are not in .messages)")
        return sorted(found, key=lambda message: message.start)

    def close(self) -> None:
        """Let go of the traces."""
        for reader in self.readers:
            reader.close()


def _idle(threads: int) -> float:
    """CPU seconds that a rank may use in _QUIET seconds and still be asleep: two clock ticks with one process group.

    Each group more brings three threads of gloo, which wake up now and then: 6 ms in 2 s for a group, measured.
    """
    return 0.021 + 0.005 * max(0, threads - 4)


def _zombie_code(pid: int) -> int | None:
    """Exit code of a process that has ended and is not reaped yet: the last field of /proc/PID/stat."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rsplit(" ", 1)[1])
    except (OSError, ValueError):
        return None
    return os.waitstatus_to_exitcode(status)
