"""Make `.venv` ready: find a Python, create the environment, install the pinned versions and the course.

Started by the Makefile, with any Python 3.8 or newer. Does nothing when nothing changed. Whatever interrupts
it, the next start ends well: `.venv/.ready` is written last, after every installed file was found complete.
"""

import contextlib
import fcntl
import hashlib
import os
import signal
import sys
import time

from packages import PYTHON, ROOT, VENV, complete, create, install
from pythons import NEWEST, OLDEST, SetUpError, find_python, probe

READY = VENV / ".ready"


def fingerprint(version: tuple) -> str:
    """Changes when something must be installed: other versions, packaging or Python, or a moved folder."""
    digest = hashlib.sha256(f"{version[:2]} {ROOT}".encode("utf-8", "surrogateescape"))
    for name in ("requirements.txt", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def present(wanted: "tuple | None") -> "tuple | None":
    """Version of the Python in `.venv` if it runs, fits, and is the one that was asked for; else None."""
    answer = probe(str(PYTHON))
    if answer is None or not OLDEST <= answer[0][:2] <= NEWEST:
        return None
    return answer[0] if wanted is None or answer[0][:2] == wanted[:2] else None


def is_ready(version: "tuple | None") -> bool:
    """Whether `.venv`, of this Python version, was installed to the end from the files as they are now."""
    return version is not None and READY.exists() and READY.read_text() == fingerprint(version)


@contextlib.contextmanager
def one_at_a_time(limit: float = 1800):
    """Hold a lock that pip inherits, so that a pip whose parent was killed is waited for."""
    with (ROOT / "requirements.txt").open("r+") as file:
        os.set_inheritable(file.fileno(), True)
        end, told = time.monotonic() + limit, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise SetUpError("Another set-up of this folder has not ended in half an hour.") from None
                if not told:
                    print("Another set-up of this folder is running; waiting for it.", flush=True)
                told = True
                time.sleep(0.5)
        yield


def set_up(wanted: str) -> None:
    """Bring `.venv` up to date, with the interpreter `wanted` when one is named. Raises SetUpError."""
    asked = find_python(wanted) if wanted else None
    version = present(asked and asked[1])
    if is_ready(version):
        return
    with one_at_a_time():
        version = present(asked and asked[1])
        if is_ready(version):  # by the one that was waited for
            return
        with contextlib.suppress(FileNotFoundError):
            READY.unlink()
        for attempt in (1, 2):
            if version is None or attempt == 2:
                path, version = asked or find_python()
                create(path, version)
            install()
            if complete():
                break
            if attempt == 2:
                raise SetUpError("The installed packages are not complete: remove .venv, then start again.")
            print("A set-up before this one was cut short and left damage. Starting anew.", flush=True)
        spare = READY.with_name(".ready.new")
        spare.write_text(fingerprint(version))
        spare.replace(READY)
        print("The course is installed in .venv.", flush=True)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception, so that pip is ended first
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        set_up(os.environ.get("PYTHON", ""))
    except (SetUpError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The next start goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
