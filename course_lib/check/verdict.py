"""What a check says in the end."""

from dataclasses import dataclass, field

from course_lib.launch import Result
from course_lib.launch.errors import wrapped


class CheckFailed(AssertionError):
    """The answer is not right; the text says what is wrong and why. `mistake` is its name, when it has one."""

    def __init__(self, text: str, mistake: str | None = None) -> None:
        super().__init__(text)
        self.mistake = mistake

    def _render_traceback_(self) -> list[str]:
        return ["", wrapped(f"✘ {self}")]


@dataclass
class Verdict:
    """The answer is right. `run`: one of the runs that were looked at, for `show.messages`, where ranks talked."""

    name: str
    points: int
    lines: list[str] = field(default_factory=list)
    run: Result | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return "\n".join([*(f"✔ {line}" for line in self.lines), f"The checks passed: {self.points} points."])

    def _repr_pretty_(self, printer, cycle: bool) -> None:
        printer.text(wrapped(repr(self)))  # what a notebook shows
