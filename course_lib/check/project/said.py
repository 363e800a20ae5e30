"""Why a launch failed, from what it printed: what the learner's code raised, and not torchrun's report about it."""

import re

from course_lib.check.project.folder import PROJECT
from course_lib.train.said import logged, spoken

_RAISED = re.compile(r"\s*((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$")
_FRAME = re.compile(rf'\s*File ".*{re.escape(PROJECT)}", line (\d+)')


def why_failed(output: str) -> str:
    """One line: the exception and where in project.py it was raised; else the last words of the ranks."""
    raised, where = "", ""
    for line in logged(output):
        if frame := _FRAME.match(line):
            where = f" ({PROJECT}, line {frame[1]})"
        elif (found := _RAISED.match(line)) and not found[1].startswith("torch."):
            raised = found[1]
    if raised:
        return raised + where
    return (spoken(output) or ["it ended without a word"])[-1]
