"""What a launch printed, without what torchrun adds to it."""

import re

_LOGGED = re.compile(r"[WEIF]\d{4} \d\d:\d\d:\d\d[^\]]*\] ?")  # in front of each line that torchrun logs


def spoken(output: str) -> list[str]:
    """The lines that the ranks wrote, without torchrun's own report after them."""
    lines = []
    for text in output.splitlines():
        if _LOGGED.match(text) or text.startswith("torch.distributed.elastic"):
            break
        if text.strip():
            lines.append(text.rstrip())
    return lines


def logged(output: str) -> list[str]:
    """All lines, those that torchrun logged without their stamp."""
    return [_LOGGED.sub("", line, count=1) for line in output.splitlines()]


def raised(output: str) -> str:
    """The traceback of a forked rank that failed before it could say so; torchrun alone tells of it. Or "".

    From the training loop's own first frame on; the frames before are torchrun's.
    """
    lines, found = iter(logged(output)), []
    for line in lines:
        if re.match(r"-- Process \d+ terminated with the following error:", line):
            break
    for line in lines:
        if not line.strip():
            break
        found.append(line)
    ours = [k for k, line in enumerate(found) if re.search(r"course_lib[/\\]train[/\\]main\.py", line)]
    return "\n".join([*found[:1], *found[ours[0] if ours else 1 :]])


def tail(output: str, lines: int = 30) -> str:
    """The end of what was printed."""
    return "\n".join(output.splitlines()[-lines:])
