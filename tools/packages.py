"""Fill `.venv`: room on the disk, the empty environment, pip, and whether all of it arrived.

Runs on any Python 3.8 or newer, before anything is installed: standard library only, no newer syntax.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from pythons import SetUpError

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "pip.log"
GB = 10**9
# Bytes that stay and bytes that pip downloads. Linux, where PyTorch brings the CUDA libraries, was measured
# on x86-64 with Python 3.11: `du -sB1 .venv`, and the sizes that pip prints. The other row is a floor.
SIZES = {"linux": (6.6 * GB, 3.3 * GB)}
FLOOR = (1.5 * GB, 0.5 * GB)
TROUBLE = {  # what pip's log says -> what it means
    "No space left on device": "The disk is full: free some space, then start again.",
    "CERTIFICATE_VERIFY_FAILED": "The certificate of the package index is not trusted on this machine.",
    "NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError": (
        "The package index cannot be reached: check the network, or the proxy, then start again."
    ),
    "No matching distribution found": "The package index has no build of this package for this machine.",
}


def check_space(free: float, present: float, sizes: tuple) -> None:
    """Raise SetUpError when `free` bytes are too few; `present` bytes of `sizes` are there already."""
    missing = max(sum(sizes) - present, 0.3 * GB)
    if free < missing:
        raise SetUpError(
            f"The set-up needs {missing / GB:.1f} GB of disk, of which {sizes[0] / GB:.1f} GB stay in use; "
            f"where this folder is, {free / GB:.1f} GB are free."
        )


def size_of(folder: Path) -> int:
    """Bytes on disk below `folder`; 0 when it is not there."""
    total = 0
    for path, _, files in os.walk(str(folder)):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(path, name).lstat().st_blocks * 512
    return total


def run(command: list, environment: "dict | None" = None) -> int:
    """Exit status of `command`. Whatever interrupts us ends it, with all that it started.

    It inherits our lock: should we be killed, the next set-up waits for it.
    """
    process = subprocess.Popen(command, cwd=str(ROOT), env=environment, close_fds=False, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def create(python: str, version: tuple) -> None:
    """A new, empty `.venv`. Raises SetUpError."""
    check_space(shutil.disk_usage(str(ROOT)).free, size_of(VENV), SIZES.get(sys.platform, FLOOR))
    print("Creating .venv with Python {}.{}.{}.".format(*version), flush=True)
    command = [python, "-m", "venv", "--clear", str(VENV)]
    if run(command):
        raise SetUpError(f"`{python} -m venv .venv` failed; the reason stands above.")


def install() -> None:
    """Install requirements.txt and the course in one call of pip, which shows progress. Raises SetUpError."""
    sizes = SIZES.get(sys.platform, FLOOR)
    free = shutil.disk_usage(str(VENV)).free
    check_space(free, size_of(VENV), sizes)
    temporary = VENV / "tmp"  # on the disk that was just checked; /tmp is often small
    temporary.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_TARGET", "PIP_PREFIX", "PIP_USER")}
    environment.update(TMPDIR=str(temporary), PYTHONNOUSERSITE="1")
    options = ["--no-user", "--no-input", "--disable-pip-version-check", "--log", str(LOG)]
    if free < sum(sizes) + sizes[1]:
        options.append("--no-cache-dir")  # pip's cache keeps every download a second time
    with contextlib.suppress(FileNotFoundError):
        LOG.unlink()
    print(
        "Installing the versions of requirements.txt. It takes minutes; pip shows what it does.",
        flush=True,
    )
    command = [str(PYTHON), "-m", "pip", "install", *options, "-r", "requirements.txt", "-e", "."]
    code = run(command, environment)
    shutil.rmtree(str(temporary), ignore_errors=True)
    if code:
        raise SetUpError(diagnosis(LOG.read_text("utf-8", "replace") if LOG.exists() else ""))


def diagnosis(log: str) -> str:
    """One sentence on why pip failed, from its log."""
    for pattern, meaning in TROUBLE.items():
        found = re.search(f".*({pattern}).*", log)
        if found:
            return f"{meaning} pip's own words: {found[0].strip()[:200]} (all of it is in .venv/pip.log)"
    return "pip could not install the packages; the reason stands above and in .venv/pip.log"


def complete() -> bool:
    """Whether every installed package has all its files: a pip that was killed can leave half of one."""
    return subprocess.run([str(PYTHON), str(ROOT / "tools" / "verify.py")]).returncode == 0
