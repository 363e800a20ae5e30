"""Whether a check was given what it asks for: a class where the exercise writes one, else a function."""

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

MAKERS = (type, FunctionType, BuiltinFunctionType, MethodType, partial)  # a function may make what a class makes


def not_wanted(name: str, given: Any) -> str | None:
    """What is wrong with `given`, as a sentence; None when it fits. A `name` such as NaiveDDP is that of a class."""
    kind = type(given).__name__
    one = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    if name[0].isupper():
        if isinstance(given, MAKERS):
            return None
        what = f"an instance of {kind}" if kind == name else one
        return f"{name} must be a class, and is {what}. Pass {name} itself, without calling it: the check does that."
    if isinstance(given, type):
        return f"{name} must be a function, and is the class {given.__name__}. Pass the function {name}."
    if not callable(given):
        return f"{name} must be a function, and is {one}. Pass {name} itself, without calling it: the check does that."
    return None
