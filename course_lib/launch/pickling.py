"""Ship a function that stands in a notebook cell to another process, so that its tracebacks still name the cell."""

import functools
import io
import linecache
import pickle
import sys
from collections import ChainMap
from types import CodeType, FunctionType
from typing import Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle


def _reduce_code(code: CodeType):
    """cloudpickle's own reduction, with the real file name kept (see cloudpickle#538 for why it drops it)."""
    make, values = _cloudpickle._code_reduce(code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)


def _reduce_cached(cached: functools._lru_cache_wrapper):
    """A function under functools.cache: as the function itself, which cloudpickle would only look for by its name."""
    function = cached.__wrapped__
    if _cloudpickle._should_pickle_by_reference(function):
        return cached.__reduce__()
    return _cache, (function, cached.cache_parameters())


def _cache(function: FunctionType, parameters: dict[str, Any]) -> functools._lru_cache_wrapper:
    return functools.lru_cache(**parameters)(function)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap(
        {CodeType: _reduce_code, functools._lru_cache_wrapper: _reduce_cached}, cloudpickle.Pickler.dispatch_table
    )


def dumps(thing: Any) -> bytes:
    """Pickle `thing`; functions and classes of a notebook or script go by value."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    return file.getvalue()


def pickle_call(fn: Any, args: tuple) -> bytes:
    """Pickle a call. Raises TypeError with a sentence that names what cannot be sent."""
    try:
        return dumps((fn, args))
    except Exception as error:  # noqa: BLE001 - pickling runs arbitrary __reduce__ code, so anything can come
        raise TypeError(_why_not(fn, args, error)) from None


def _fails(thing: Any) -> bool:
    try:
        dumps(thing)
    except Exception:  # noqa: BLE001 - as above
        return True
    return False


def _why_not(fn: Any, args: tuple, error: Exception) -> str:
    name = getattr(fn, "__name__", repr(fn))
    for position, value in enumerate(args):
        if _fails(value):
            return (
                f"args[{position}] is a {type(value).__name__}, which cannot be sent to another process: "
                f"pass plain data or tensors, and make the {type(value).__name__} inside {name}."
            )
    if isinstance(fn, FunctionType):
        used = {key: fn.__globals__[key] for key in fn.__code__.co_names if key in fn.__globals__}
        for key, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            used[key] = cell.cell_contents
        for key, value in used.items():
            if _fails(value):
                return (
                    f"{name} uses the variable {key!r}, a {type(value).__name__}, which cannot be sent to "
                    f"another process: make it inside {name}, or pass plain data in args."
                )
    return f"{name} cannot be sent to another process: {error}"


def text_of(error: BaseException) -> str:
    """What the exception says; its own __str__ may fail."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - the learner's __str__ can raise anything
        return f"(its __str__ raised {type(failure).__name__})"


def cell_names() -> dict[str, str]:
    """Map the file names of this kernel's cells to "Cell In[n]"; empty outside IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return {}
    numbers = getattr(shell.compile, "_filename_map", {})
    return {name: f"Cell In[{number}]" for name, number in numbers.items()}


def cell_sources() -> dict[str, list[str]]:
    """The text of this kernel's cells, by file name, for `linecache` in the ranks."""
    return {name: linecache.getlines(name) for name in cell_names()}
