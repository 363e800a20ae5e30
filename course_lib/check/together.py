"""Run a function on groups of ranks and bring back what was seen, as plain data. It judges nothing.

This is the seam: the same `Evidence` can come from ranks inside a sandbox.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from course_lib.check import driven, plain
from course_lib.check.alone import start
from course_lib.check.group import Breakdown, Evidence, GroupCase, RankAnswer
from course_lib.check.in_rank import FENCE, take_part
from course_lib.collectives.tracked import Event
from course_lib.launch import Message, RunError, run, scratch
from course_lib.launch.pickling import cell_names

FINISHED = "has finished this case"
_AT_FENCE = re.compile(rf"waits in barrier \({re.escape(FENCE)}, line \d+\)")


def collect(fn: Callable, evidence: Evidence, numbers: Iterable[int], seconds: float) -> None:
    """Run the cases with these numbers in one start of processes, and add what was seen to `evidence`.

    The largest group must come first. When a case ends badly, the ones after it are left out.
    """
    chosen = list(numbers)
    cases = [evidence.cases[number] for number in chosen]
    fields = ((c.inputs, c.options, c.traced, c.late, c.drive) for c in cases)
    script = [(k, *values) for k, values in zip(chosen, fields, strict=True)]
    folder = Path(tempfile.mkdtemp(prefix="check-", dir=scratch()))
    error = None
    try:
        arguments = (fn, script, str(folder), cell_names())
        work = driven.take_part if any(case.drive for case in cases) else take_part
        result = run(work, cases[0].world, arguments, timeout=seconds, start=start(), quiet=True)
        messages, zero = result.messages, result.zero
    except RunError as problem:
        error, messages, zero = problem, problem.messages, problem.zero
    finally:
        for number, case in zip(chosen, cases, strict=True):
            paths = [folder / f"case_{number}_rank_{rank}" for rank in range(case.world)]
            if any(path.exists() for path in paths):
                evidence.answers[number] = [_answer(path) for path in paths]
        shutil.rmtree(folder, ignore_errors=True)
    evidence.messages |= _by_case(messages, chosen, cases)
    evidence.zero |= dict.fromkeys(chosen, zero)
    if error:
        failed = next((number for number in chosen if not evidence.complete(number)), chosen[-1])
        text = _in_terms_of_the_case(str(error), evidence.cases[failed].world)
        evidence.broken[failed] = Breakdown(text, error.deadlock, error.culprit)


def _in_terms_of_the_case(text: str, world: int) -> str:
    """How a run ended, without the judge's own barrier: a rank that waits there has finished the case.

    So it is no link of a circle: who waits for it waits for a rank that has returned. Ranks from `world` on, which had
    a part in larger cases only, are left out.
    """
    done = set(re.findall(rf"^rank (\d+): {_AT_FENCE.pattern}", text, re.MULTILINE))
    text = re.sub(rf"calls barrier with 0 bytes \({re.escape(FENCE)}, line \d+\)", FINISHED, text)
    lines = _AT_FENCE.sub(FINISHED, text).replace(f"{FINISHED}, but rank", f"{FINISHED}, rank")
    lines = re.sub(rf"({FINISHED}, rank \d+) does not call it: it", r"\1 has not: it", lines).split("\n")
    lines = [line for line in lines if not (own := re.match(r"rank (\d+): returned$", line)) or int(own[1]) < world]
    for at, line in enumerate(lines):
        circle = re.match(r"A circle, rank ([\d →]+):", line)
        if circle and done & set(circle[1].split(" → ")):
            lines[at] = _waits_in_vain(lines, done)
    return "\n".join(lines)


def _waits_in_vain(lines: list[str], done: set[str]) -> str:
    for line in lines:
        waits = re.match(r"rank (\d+): (waits in \w+ (from|to) rank (\d+) .*)", line)
        if waits and waits[4] in done:
            more = "sending anything more" if waits[3] == "from" else "receiving it"
            return f"rank {waits[1]} {waits[2]}, but rank {waits[4]} {FINISHED} without {more}."
    return "Some ranks have finished this case, and the others wait."


def _answer(path: Path) -> RankAnswer | None:
    if not path.exists():
        return None
    try:
        facts, tensors = plain.read(path)
        facts["events"] = tuple(Event(**event) for event in facts.get("events", ()))
        facts |= {name: tuple(facts.get(name, ())) for name in ("open", "touched")}
        named = {name[1:]: tensors.pop(name) for name in list(tensors) if name.startswith(".")}
        return RankAnswer(**facts, **tensors, tensors=named)
    except (TypeError, ValueError) as problem:
        return RankAnswer(plain.NOTHING, error="ValueError", error_text=f"an unreadable answer: {problem}")


def _by_case(messages: list[Message], numbers: list[int], cases: list[GroupCase]) -> dict[int, list[Message]]:
    """Cut each rank's messages at the judge's own barriers. A smaller group begins after one barrier more."""
    fences: list[int | None] = []
    for k, (number, case) in enumerate(zip(numbers, cases, strict=True)):
        if k and case.world < cases[k - 1].world:
            fences.append(None)
        fences.append(number)
    found: dict[int, list[Message]] = {number: [] for number in numbers}
    passed: dict[int, int] = {}
    for message in messages:  # by start time, so in order for each rank
        if message.op == "barrier" and message.where.startswith(f"{FENCE}, "):
            passed[message.rank] = passed.get(message.rank, 0) + 1
        elif 0 < (count := passed.get(message.rank, 0)) <= len(fences) and fences[count - 1] is not None:
            found[fences[count - 1]].append(message)
    return found
