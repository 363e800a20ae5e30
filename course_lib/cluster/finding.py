"""What a check found out: one line for a person, one object for `--json`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`note` works, but a person should know; `problem` does not work, and `cure` says what to do."""

    check: str
    verdict: Verdict
    text: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"\n{'':9}cure: {self.cure}" if self.cure else ""
        return f"{self.verdict:<8} {self.check}: {self.text}{cure}"


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, cure: str = "") -> Finding:
    return Finding(check, "note", text, cure)


def problem(check: str, text: str, cure: str) -> Finding:
    return Finding(check, "problem", text, cure)
