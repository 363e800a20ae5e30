"""The text of a failed run: the culprit first, then one line for each other rank."""

from collections.abc import Sequence

from course_lib.launch.diagnose import RankState
from course_lib.launch.hang import explain_hang, mismatch
from course_lib.launch.result import Message


def story(
    states: list[RankState], messages: Sequence[Message], guilty: RankState | None, headline: str | None, log: str
) -> str:
    """`guilty`: the rank that failed first; `headline`: what ended a run that hung; `log`: what torchrun wrote."""
    if headline:
        lines = [headline, "", explain_hang(states, messages)]
    elif guilty and guilty.error:
        lines = _error(guilty)
    elif guilty:
        lines = [f"rank {guilty.rank} {guilty.death()}"]
    else:
        lines = [_no_start(states, log)]
    if told := mismatch(states):
        lines = [lines[0], "", told] if headline else [*lines, "", told]
    others = [f"rank {s.rank}: {s.words()}" for s in states if s is not guilty]
    return "\n".join([*lines, "", *others])


def _error(guilty: RankState) -> list[str]:
    lines = [f"rank {guilty.rank} failed: {guilty.error['type']}: {guilty.error['message']}", ""]
    for frame in guilty.error["frames"]:
        lines += [f"  {frame['where']}, in {frame['function']}", f"      {frame['text']}"]
    return lines + [f"  {cause}" for cause in guilty.error["causes"]]


def _no_start(states: list[RankState], log: str) -> str:
    lost = [s for s in states if s.victim]
    if lost:
        return f"rank {lost[0].rank} failed: {lost[0].error['type']}: {lost[0].error['message']}"
    tail = log.strip().splitlines()[-12:]
    return "torchrun ended before the ranks did:\n" + "\n".join(tail)
