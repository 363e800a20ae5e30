"""Ask another program, with a time limit, and leave nothing behind.

Checks that could hang or crash (a driver, an import of torch, ranks) run in a process of their own.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Answer:
    """code is None when the program did not end within its limit."""

    code: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last thing it said: for most programs the reason of a failure."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def python(module: str, *args: str, limit: float) -> Answer:
    """Run `python -m module args` with this interpreter."""
    return ask([sys.executable, "-m", module, *args], limit)


def ask(command: list[str], limit: float) -> Answer:
    """Run a command for at most `limit` seconds; it and all that it started are killed then.

    Raises FileNotFoundError when there is no such program.
    """
    # Files, not pipes: a grandchild that lives on would keep a pipe open, and reading it would never end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                _kill(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Answer(code, *texts)


def _kill(process: subprocess.Popen) -> None:
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.kill()
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue  # it ended by itself, as it should
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        return  # stuck in the kernel (a dead driver): nobody can end it, and the report must go on
