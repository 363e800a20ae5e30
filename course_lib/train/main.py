"""What `python -m course_lib.train` does, on each rank.

Exit codes: 0 finished, 1 failed, 2 cannot start (one sentence says why, nothing was written), 75 stopped by a
signal or run.stop_after, to be continued. torchrun turns every code but 0 into 1, so look at status.json,
which says it in words.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.train import environment
from course_lib.train.cli import Help, parse
from course_lib.train.config import check
from course_lib.train.errors import ConfigError, Diverged
from course_lib.train.job import Job
from course_lib.train.journal import Journal
from course_lib.train.loop import fit
from course_lib.train.plan import plan
from course_lib.train.prepare import prepare
from course_lib.train.status import report_failure
from course_lib.train.stopping import StopRequest, listening

FINISHED, FAILED, REFUSED, STOPPED = 0, 1, 2, 75  # 75: EX_TEMPFAIL of sysexits.h, "try again later"


@record
def main(words: list[str] | None = None) -> int:
    """Run one rank; the exit code."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(sys.argv[1:] if words is None else words)
        check(config, environment.read_launcher()[2])
        with environment.start(config.run.device, config.run.timeout) as env:
            job = prepare(config, env)
            # Signals outermost: the launcher's SIGTERM to the survivors must not cut off the note of a failure.
            with listening() as request, failure_noted(job.folder, env.rank):
                env.say(plan(job))
                journal = Journal(job)
                code, why = train(job, journal, request)
                env.say(goodbye(job, code, why))
    except Help as text:
        return leave(str(text), FINISHED, first)
    except ConfigError as error:
        return leave(str(error), REFUSED, first)
    return code


def train(job: Job, journal: Journal, request: StopRequest) -> tuple[int, str]:
    """The loop, and its end in status.json; the exit code and why, empty when it finished."""
    try:
        why = fit(job, journal, request)
    except Diverged as error:
        journal.status("failed", str(error))
        return FAILED, str(error)
    journal.status("stopped" if why else "finished", why or "")
    return (STOPPED, why) if why else (FINISHED, "")


def goodbye(job: Job, code: int, why: str) -> str:
    """The last line."""
    if code == FAILED:
        return f"Failed: {why}. The run is in {job.folder}, with the checkpoints from before, if any."
    if code == STOPPED:
        return f"Stopped ({why}); saved in {job.folder}: the same command with --run.dir {job.folder} continues."
    return f"Finished: {job.folder}"


def leave(text: str, code: int, first: bool) -> int:
    """Rank 0 speaks and goes; the others follow.

    Were they first, the launcher would end rank 0 before it spoke. It ends nobody for a code of 0.
    """
    if first:
        environment.speak(text, error=code != FINISHED)
    elif code:
        time.sleep(5)  # ended earlier by the launcher
    return code


@contextlib.contextmanager
def failure_noted(folder: Path, rank: int) -> Iterator[None]:
    """Write an exception into status.json, then let it end the rank."""
    try:
        yield
    except BaseException as error:
        report_failure(folder, rank, error)
        raise
