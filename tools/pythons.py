"""Find a Python that the course can use.

Runs on any Python 3.8 or newer, before anything is installed: standard library only, no newer syntax.
"""

import shutil
import subprocess
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
NAMES = ("python3.13", "python3.12", "python3.11", "python3", "python")
# Prints version, whether a virtual environment can be made, bits, system, machine.
PROBE = (
    "import importlib.util as u, platform as p, sys;"
    "print(*sys.version_info[:3], int(all(map(u.find_spec, ('venv', 'ensurepip')))), sys.maxsize > 2**32,"
    " p.system(), p.machine(), sep='|')"
)


class SetUpError(Exception):
    """What is missing, in one sentence that a learner can act on."""


def probe(name: str) -> "tuple | None":
    """(version, has venv, platform text) of the interpreter `name`, or None when it does not run."""
    try:
        done = subprocess.run(
            [name, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor, patch, venv, wide, system, machine = done.stdout.decode().strip().split("|")
    version = (int(major), int(minor), int(patch))
    return version, venv == "1", f"{system} {machine}{'' if wide == 'True' else ' 32-bit'}"


def find_python(wanted: str = "") -> "tuple[str, tuple]":
    """Path and version of the first fitting interpreter: `wanted` alone when given, otherwise NAMES in order.

    Raises SetUpError, which names what was found instead.
    """
    found, without_venv = [], []
    for name in [wanted] if wanted else NAMES:
        path = shutil.which(str(Path(name).expanduser()) if "/" in name else name)
        answer = probe(path) if path else None
        if answer is None:
            continue
        version, venv, platform = answer
        text = f"{name} is {version[0]}.{version[1]}.{version[2]}"
        if not OLDEST <= version[:2] <= NEWEST:
            found.append(text)
        elif platform == "Darwin x86_64" or "32-bit" in platform:
            found.append(f"{text} for {platform}, for which PyTorch is no longer built")
        elif not venv:
            without_venv.append((text, version))
        else:
            return path, version
    if without_venv:
        text, version = without_venv[0]
        raise SetUpError(
            f"{text} but cannot make a virtual environment, since its venv or ensurepip module is missing: "
            f"on Debian or Ubuntu, run `sudo apt install python{version[0]}.{version[1]}-venv`."
        )
    seen = "; ".join(dict.fromkeys(found)) or ("it does not run" if wanted else "none")
    asked = f" but PYTHON={wanted}" if wanted else ""
    raise SetUpError(
        f"Python 3.11, 3.12 or 3.13 is needed{asked}; found: {seen}. Install one from python.org, a package "
        "manager or conda, or name it: `make lab PYTHON=/path/to/python3.12`."
    )
