"""Run a function in a process of its own, on many inputs, and bring back its answers. It judges nothing."""

import traceback
from collections.abc import Callable
from pathlib import Path

from course_lib.check.spec import Answer, FolderSpec, Spec
from course_lib.check.verdict import CheckFailed
from course_lib.launch import RunError, run
from course_lib.launch.pickling import cell_names, dumps, text_of
from course_lib.launch.supervise import can_fork


def start() -> str:
    """How the judge starts ranks: without torchrun where that is possible, which is quicker."""
    return "direct" if can_fork() else "auto"


def answers(spec: Spec | FolderSpec, fn: Callable, inputs: list[tuple]) -> list[Answer]:
    """One answer for each input. Raises CheckFailed when the function does not come back."""
    call = (fn, inputs, cell_names())
    try:
        return run(_call_all, 1, args=call, timeout=spec.seconds, quiet=True, start=start()).results[0]
    except RunError as error:
        raise CheckFailed(f"{spec.function} did not come back.\n{error}", "no_answer") from None


def _call_all(fn: Callable, inputs: list[tuple], cells: dict[str, str]) -> list[Answer]:
    """In the learner's process: call, and keep the answer or the error of each call."""
    found = []
    for values in inputs:
        try:
            value = fn(*values)
            dumps(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the learner's code raises is its answer
            last = ([None, *traceback.extract_tb(error.__traceback__)[1:]])[-1]  # none: the call itself failed
            where = f"{cells.get(last.filename) or Path(last.filename).name}, line {last.lineno}" if last else ""
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            found.append(Answer(None, type(error).__name__, text_of(error), where, kinds))
        else:
            found.append(Answer(value))
    return found
