"""How a run ends badly, as exceptions that read well in a notebook."""

import textwrap

_WIDTH = 100  # JupyterLab breaks longer lines of an error in the middle of a word


def wrapped(text: str) -> str:
    """Long lines as several, broken between words; lines that are indented, such as source text, stay."""
    lines = text.splitlines()
    parts = [[line] if line.startswith(" ") else textwrap.wrap(line, _WIDTH, break_long_words=False) for line in lines]
    return "\n".join("\n".join(part) for part in parts)


class RunError(RuntimeError):
    """A run that failed or hung. The text names the culprit first, then tells what each rank did.

    culprit    the rank that failed first, or None for a hang
    messages   all calls of torch.distributed until then
    output     what each rank had printed
    zero       the moment of time.monotonic() from which the times of the messages count
    deadlock   all ranks waited for one another, and none would ever have gone on
    """

    def __init__(
        self, text: str, *, culprit: int | None = None, messages=(), output=(), zero=0.0, deadlock=False
    ) -> None:
        super().__init__(text)
        self.culprit, self.messages, self.output, self.deadlock = culprit, list(messages), list(output), deadlock
        self.zero: float = zero

    def _render_traceback_(self) -> list[str]:
        return ["", wrapped(f"{type(self).__name__}: {self}")]


class RunInterrupted(KeyboardInterrupt):
    """The run was interrupted; all its processes have ended."""

    def _render_traceback_(self) -> list[str]:
        return [wrapped(str(self))]
