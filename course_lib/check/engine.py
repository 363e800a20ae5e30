"""Judge a function: it runs in processes of its own on fresh inputs; what came out is compared out here."""

import random
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.check.alone import answers
from course_lib.check.group import KINDS, Evidence, GroupMistake, GroupSpec, RankAnswer, Wrong
from course_lib.check.spec import Answer, Case, FolderSpec, Spec
from course_lib.check.together import collect
from course_lib.check.verdict import CheckFailed, Verdict
from course_lib.check.wanted import not_wanted
from course_lib.launch import Result
from course_lib.launch.pickling import pickle_call

__all__ = ["CheckFailed", "Verdict", "judge", "judge_folder"]

BRIEF = 8.0  # seconds for two ranks alone, when more of them have hung


def judge(spec: Spec | GroupSpec, fn: Callable[..., Any], seed: int | None = None) -> Verdict:
    """Run `fn` on the cases of `spec` and compare. Raises CheckFailed with what is wrong first."""
    _refuse_no_function(spec, fn)
    return (_judge_group if isinstance(spec, GroupSpec) else _judge_alone)(spec, fn, random.Random(seed))


def judge_folder(spec: FolderSpec, folder: Path, fn: Callable[[], Any] | None = None) -> Verdict:
    """Look at what lies in `folder`, and at what `fn()` returns when the stage asks for it. Raises CheckFailed."""
    if not spec.function:
        return Verdict(spec.name, spec.points, spec.stage(folder))
    _refuse_no_function(spec, fn)
    with chdir(folder):  # the function reads what lies there
        (answer,) = answers(spec, fn, [()])
    if answer.error == "NotImplementedError":
        raise CheckFailed(_still_the_stub(spec), "stub")
    if answer.error:
        where = f"\n  raised at {answer.where}" if answer.where else ""
        raise CheckFailed(f"{spec.function} raised {answer.error}: {answer.message}{where}", "raised")
    return Verdict(spec.name, spec.points, spec.stage(folder, answer.value))


def _refuse_no_function(spec: Spec | GroupSpec | FolderSpec, fn: Any) -> None:
    if wrong := not_wanted(spec.function, fn):
        raise CheckFailed(wrong)
    try:
        pickle_call(fn, ())
    except TypeError as problem:
        raise CheckFailed(str(problem)) from None


def _judge_alone(spec: Spec, fn: Callable, rng: random.Random) -> Verdict:
    cases = spec.cases(rng)
    counted: dict[str, int] = {}
    for case, answer in zip(cases, answers(spec, fn, [case.inputs for case in cases]), strict=True):
        if answer.error == "NotImplementedError":
            raise CheckFailed(_still_the_stub(spec), "stub")
        if wrong := spec.compare(case, answer):
            raise _failure(spec, case, answer, wrong)
        counted[case.group] = counted.get(case.group, 0) + 1
    lines = [f"{group} ({count} case{'s' * (count > 1)})" for group, count in counted.items()]
    return Verdict(spec.name, spec.points, lines)


def _still_the_stub(spec: Spec | GroupSpec | FolderSpec) -> str:
    return f"{spec.function} is still the stub: write it in the cell above."


def _hole(spec: GroupSpec, answer: RankAnswer) -> str:
    """Of a class with several parts to write, another one than the first may be what is missing."""
    if spec.function[0].islower() or answer.error_in in ("", "<module>", "__init__"):
        return _still_the_stub(spec)
    return f"{spec.function} is not finished: {answer.error_in} ({answer.error_at}) still raises NotImplementedError."


def _failure(spec: Spec, case: Case, answer: Answer, wrong: str) -> CheckFailed:
    found = next((mistake for mistake in spec.mistakes if mistake.fits(case, answer)), None)
    text = f"{case.story}: {wrong}"
    if answer.error and answer.where:
        text += f"\n  raised at {answer.where}"
    return CheckFailed(f"{text}\n{found.says}" if found else text, found.name if found else None)


def _judge_group(spec: GroupSpec, fn: Callable, rng: random.Random) -> Verdict:
    evidence = Evidence(spec.cases(rng))
    collect(fn, evidence, range(len(evidence.cases)), spec.seconds)
    try:
        wrong = spec.compare(evidence)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:  # what ranks say is not trusted
        text = f"The ranks came back without what the check needs to see ({problem!r}): was its own code changed there?"
        raise CheckFailed(text) from problem
    if wrong is None:
        return Verdict(spec.name, spec.points, spec.praise(evidence), _pictured(spec, evidence))
    if hole := next((a for k in evidence.answers.values() for a in k if a and a.error == "NotImplementedError"), None):
        raise CheckFailed(_hole(spec, hole), "stub")
    found = _named(spec, evidence, wrong)
    pairs = [k for k, case in enumerate(evidence.cases) if case.world == 2]
    quick = all(broken.deadlock or broken.culprit is not None for broken in evidence.broken.values())  # no time-out
    left_out = evidence.broken and not evidence.answers.keys() & set(pairs)
    if not found and wrong.kind in ("values", "hangs") and left_out and quick:
        collect(fn, evidence, pairs, BRIEF)  # what was left out may tell more: does it work for two?
        found = _named(spec, evidence, wrong)
    raise _group_failure(wrong, *(found or (None, "")))


def told(spec: GroupSpec, evidence: Evidence) -> CheckFailed | None:
    """What is wrong, as the learner reads it, from evidence that is there already; None when all is right."""
    wrong = spec.compare(evidence)
    return wrong and _group_failure(wrong, *(_named(spec, evidence, wrong) or (None, "")))


def _named(spec: GroupSpec, evidence: Evidence, wrong: Wrong) -> tuple[GroupMistake, str] | None:
    """The first known mistake that fits, and its sentence."""
    fitting = [m for m in spec.mistakes if wrong.kind in (m.kinds or set(KINDS) - {"raised"})]
    said = ((mistake, mistake.says(evidence, wrong)) for mistake in fitting)
    return next(((mistake, text) for mistake, text in said if text), None)


def _group_failure(wrong: Wrong, known: GroupMistake | None, sentence: str) -> CheckFailed:
    detail = wrong.detail if known is None or known.detail else ""
    return CheckFailed("\n".join(filter(None, [wrong.text, detail, sentence])), known.name if known else None)


def _pictured(spec: GroupSpec, e: Evidence) -> Result:
    """The first case of the group that the specification wants to be seen, as a run of its own."""
    number = e.numbers(group=spec.pictured)[0]
    found = e.messages[number]
    zero = min((m.start for m in found), default=0.0)
    messages = [replace(m, start=m.start - zero, end=None if m.end is None else m.end - zero) for m in found]
    last = max((m.end for m in messages if m.end is not None), default=0.0)
    values = [answer.after if answer.value is None else answer.value for answer in e.answers[number]]
    return Result(values, [""] * len(values), messages, last)
