"""Run checks one after another: none can hang the others, and none can hide them."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from course_lib.cluster.finding import Finding, problem

Findings = Finding | list[Finding]


@dataclass(frozen=True)
class Check:
    """A named look at one thing, with the seconds that it may take."""

    name: str
    work: Callable[[], Findings]
    limit: float = 20


def examine(checks: list[Check]) -> Iterator[Finding]:
    """Yield what each check found as soon as it is known."""
    for check in checks:
        found = _within_limit(check)
        yield from found if isinstance(found, list) else [found]


def _within_limit(check: Check) -> Findings:
    box: list[Findings] = []

    def work() -> None:
        try:
            box.append(check.work())
        except Exception as error:  # noqa: BLE001  a check that fails is a finding, too
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
            text = f"the check itself failed: {what}."
            box.append(problem(check.name, text, "see the lines around it; if they are ok, please report this."))

    # A daemon: a thread that hangs cannot be stopped, but this one does not keep the program from ending.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(check.limit)
    return box[0] if box else _hanging(check, thread)


def _hanging(check: Check, thread: threading.Thread) -> Finding:
    frame = sys._current_frames().get(thread.ident)
    where = f" It hangs in {frame.f_code.co_name}, line {frame.f_lineno}." if frame else ""
    text = f"no answer within {check.limit:g} s.{where}"
    return problem(check.name, text, "look for a network disk, name server or driver that does not answer.")
