"""What this machine can do, in words, for the first lesson: `show.machine()`."""

from collections.abc import Callable
from html import escape
from typing import Any

from course_lib.cluster import memory, probe
from course_lib.cluster.doctor import quick_checks
from course_lib.cluster.examine import examine
from course_lib.cluster.finding import Finding
from course_lib.cluster.gpus import RECORDED

_SIGNS = {"ok": "✓", "note": "•", "problem": "✗"}


class Machine:
    """One sentence, and a line for each thing that was looked at."""

    def __init__(self, sentence: str, findings: list[Finding]):
        self.sentence, self.findings = sentence, findings

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        rows = "".join(_row(finding) for finding in self.findings)
        html = f"<p><b>{escape(self.sentence)}</b></p><table>{rows}</table>"
        return {"text/html": html, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return "\n".join([self.sentence, *map(str, self.findings)])


def machine(look: Callable[[], dict[str, Any]] | None = None) -> Machine:
    """Look at Python, torch, cores, memory, disk and GPUs: the quick part of `course doctor`.

    look   asks torch about itself; the default does so in a process of its own, which takes some seconds
    """
    look = look or probe.Torch()
    findings = list(examine(quick_checks(look)))
    problems = [finding for finding in findings if finding.verdict == "problem"]
    if problems:
        names = ", ".join(dict.fromkeys(finding.check for finding in problems))
        return Machine(f"This machine is not ready yet: see {names} below.", findings)
    return Machine(sentence(look()), findings)


def sentence(found: dict[str, Any], free: int | None = None) -> str:
    """How many ranks can start, and on what. `free` is memory in bytes (measured when not given)."""
    fit = memory.ranks_that_fit(found["rank_bytes"], free)
    can = min(fit, memory.WANTED)
    text = f"{can} ranks can start here"
    if can < memory.WANTED:
        text += f" ({memory.WANTED} need more memory)"
    gpus = len(found["gpus"])
    if not gpus:
        return f"{text}; no GPU: {RECORDED}."
    return f"{text}; {gpus} GPU{'s' if gpus > 1 else ''}: {found['gpus'][0]['name']}."


def _row(finding: Finding) -> str:
    cure = f"<br><b>What to do:</b> {escape(finding.cure)}" if finding.cure else ""
    sign = f'<span title="{finding.verdict}">{_SIGNS[finding.verdict]}</span>'
    cells = [sign, escape(finding.check), escape(finding.text) + cure]
    return "<tr>" + "".join(f'<td style="text-align: left">{cell}</td>' for cell in cells) + "</tr>"
