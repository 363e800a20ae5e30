"""A function by its name, FILE.py:FUNCTION: so that a command line can say which."""

import re
import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches, reload
from pathlib import Path
from types import ModuleType
from typing import Any

_NAMED = re.compile(r"(.+\.py):(\w+)")
_loaded: dict[str, int] = {}  # module name: when its file was written last, in ns


class NoFunction(Exception):
    """The name leads nowhere: one full sentence."""


def is_named(name: str) -> bool:
    """Whether the name is a function in a Python file."""
    return _NAMED.fullmatch(name) is not None


def split(name: str) -> tuple[Path, str]:
    """The file, absolute, and the function; the file is looked for in the current folder when it is relative."""
    file, wanted = _NAMED.fullmatch(name).groups()
    return Path(file).resolve(), wanted


def function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names.

    Raises NoFunction when file or function are not there. What the file itself raises passes.
    """
    path, wanted = split(name)
    if not path.is_file():
        raise NoFunction(f"{name}: there is no file {path}.")
    found = getattr(_module(name, path), wanted, None)
    if not callable(found):
        raise NoFunction(f"{name}: {path.name} has no function {wanted}.")
    return found


def _module(name: str, path: Path) -> ModuleType:
    """The file as an ordinary module, so that loader processes, which import it anew, find it too."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    written = path.stat().st_mtime_ns
    invalidate_caches()  # it may have been written a moment ago
    module = import_module(path.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise NoFunction(f"{name}: another module is called {path.stem}, too; give the file another name.")
    if _loaded.setdefault(path.stem, written) != written:  # a notebook's kernel lives longer than a file stays the same
        module, _loaded[path.stem] = reload(module), written
    return module
