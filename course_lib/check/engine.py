"""Judge a function: it runs in processes of its own on fresh inputs; what came out is compared out here."""

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.check.group import Evidence, GroupMistake, GroupSpec, Wrong
from course_lib.check.spec import Answer, Case, Spec
from course_lib.check.together import collect
from course_lib.launch import RunError, run
from course_lib.launch.pickling import cell_names, dumps, text_of


class CheckFailed(AssertionError):
    """The answer is not right; the text says what is wrong and why. `mistake` is its name, when it has one."""

    def __init__(self, text: str, mistake: str | None = None) -> None:
        super().__init__(text)
        self.mistake = mistake

    def _render_traceback_(self) -> list[str]:
        return ["", f"✘ {self}"]


@dataclass
class Verdict:
    """What was found: a line for each group of cases."""

    name: str
    points: int
    lines: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return "\n".join([*(f"✔ {line}" for line in self.lines), f"The checks passed: {self.points} points."])


def judge(spec: Spec | GroupSpec, fn: Callable[..., Any], seed: int | None = None) -> Verdict:
    """Run `fn` on the cases of `spec` and compare. Raises CheckFailed with what is wrong first."""
    if not callable(fn):
        raise CheckFailed(f"{spec.function} must be a function, and is a {type(fn).__name__}.")
    if isinstance(spec, GroupSpec):
        return _judge_group(spec, fn, seed)
    cases = spec.cases(random.Random(seed))
    answers = _answers(spec, fn, [case.inputs for case in cases])
    counted: dict[str, int] = {}
    for case, answer in zip(cases, answers, strict=True):
        if answer.error == "NotImplementedError":
            raise CheckFailed(f"{spec.function} is still the stub: write it in the cell above.", "stub")
        if wrong := spec.compare(case, answer):
            raise _failure(spec, case, answer, wrong)
        counted[case.group] = counted.get(case.group, 0) + 1
    lines = [f"{group} ({count} case{'s' * (count > 1)})" for group, count in counted.items()]
    return Verdict(spec.name, spec.points, lines)


def _judge_group(spec: GroupSpec, fn: Callable, seed: int | None) -> Verdict:
    evidence = Evidence(spec.cases(random.Random(seed)))
    collect(fn, evidence, range(len(evidence.cases)), spec.seconds)
    wrong = spec.compare(evidence)
    found = wrong and _named(spec, evidence, wrong)
    pairs = [k for k, case in enumerate(evidence.cases) if case.world == 2]
    if wrong and not found and evidence.broken and not evidence.answers.keys() & set(pairs):
        collect(fn, evidence, pairs, spec.seconds)  # what was left out may tell more: does it work for two?
        found = _named(spec, evidence, wrong)
    if wrong:
        raise _group_failure(wrong, *(found or (None, "")))
    return Verdict(spec.name, spec.points, spec.praise(evidence))


def _named(spec: GroupSpec, evidence: Evidence, wrong: Wrong) -> tuple[GroupMistake, str] | None:
    """The first known mistake that fits, and its sentence."""
    said = ((mistake, mistake.says(evidence, wrong)) for mistake in spec.mistakes)
    return next(((mistake, text) for mistake, text in said if text), None)


def _group_failure(wrong: Wrong, known: GroupMistake | None, sentence: str) -> CheckFailed:
    if known and known.name == "stub":
        return CheckFailed(sentence, "stub")
    detail = wrong.detail if known is None or known.detail else ""
    return CheckFailed("\n".join(filter(None, [wrong.text, detail, sentence])), known.name if known else None)


def _failure(spec: Spec, case: Case, answer: Answer, wrong: str) -> CheckFailed:
    found = next((mistake for mistake in spec.mistakes if mistake.fits(case, answer)), None)
    text = f"{case.story}: {wrong}"
    if answer.error and answer.where:
        text += f"\n  raised at {answer.where}"
    return CheckFailed(f"{text}\n{found.says}" if found else text, found.name if found else None)


def _answers(spec: Spec, fn: Callable, inputs: list[tuple]) -> list[Answer]:
    try:
        return run(_call_all, 1, args=(fn, inputs, cell_names()), timeout=spec.seconds, quiet=True).results[0]
    except RunError as error:
        raise CheckFailed(f"{spec.function} did not come back.\n{error}", "no_answer") from None


def _call_all(fn: Callable, inputs: list[tuple], cells: dict[str, str]) -> list[Answer]:
    """In the learner's process: call, and keep the answer or the error of each call."""
    answers = []
    for values in inputs:
        try:
            value = fn(*values)
            dumps(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the learner's code raises is its answer
            last = ([None, *traceback.extract_tb(error.__traceback__)[1:]])[-1]  # none: the call itself failed
            where = f"{cells.get(last.filename) or Path(last.filename).name}, line {last.lineno}" if last else ""
            answers.append(Answer(None, type(error).__name__, text_of(error), where))
        else:
            answers.append(Answer(value))
    return answers
