"""What `python -m course_lib.train` does, on each rank.

Exit codes are explained in exits.py."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.launch.dying import die_with_parent
from course_lib.train import environment
from course_lib.train.cli import Help, parse
from course_lib.train.config import check
from course_lib.train.errors import CannotWrite, ConfigError, Diverged
from course_lib.train.exits import CANNOT_WRITE, FAILED, FINISHED, REFUSED, stopped
from course_lib.train.heartbeat import heartbeat
from course_lib.train.job import Job
from course_lib.train.journal import Journal
from course_lib.train.loop import fit
from course_lib.train.plan import plan
from course_lib.train.prepare import prepare
from course_lib.train.status import report_failure
from course_lib.train.stopping import StopRequest, end_loaders, listening


@record
def main(words: list[str] | None = None) -> int:
    """Run one rank; the exit code."""
    first = os.environ.get("RANK", "0") == "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # when torchrun is killed, nobody else would end its ranks
    try:
        config = parse(sys.argv[1:] if words is None else words)
        check(config, environment.read_launcher()[2])
        with environment.start(config.run.device, max(config.run.timeout, config.run.first_timeout)) as env:
            job = prepare(config, env)
            # Signals outermost: the launcher's SIGTERM to the survivors must not cut off the note of a failure.
            with listening(config.run.max_minutes) as request, failure_noted(job.folder, env.rank):
                env.say(words_of_plan := plan(job))
                journal = Journal(job, words_of_plan)
                status, why = train(job, journal, request)
                env.say(goodbye(job, status, why))
    except Help as text:
        return leave(str(text), FINISHED, first)
    except ConfigError as error:
        return leave(str(error), REFUSED, first)
    except CannotWrite as error:
        return leave(str(error), CANNOT_WRITE, first)
    return {"finished": FINISHED, "stopped": stopped(), "failed": FAILED}[status]


def train(job: Job, journal: Journal, request: StopRequest) -> tuple[str, str]:
    """The loop, and its end in status.json; returns that: "finished", "stopped" or "failed", and why."""
    run, env = job.config.run, job.env
    try:
        with heartbeat(job.folder, env.rank, env.world_size, run.stall, run.timeout) as heart:
            why = fit(job, journal, request, heart.beat) or ""
        status = "stopped" if why else "finished"
    except Diverged as error:
        status, why = "failed", str(error)
    journal.close(status, why)
    return status, why


def goodbye(job: Job, status: str, why: str) -> str:
    """The last line."""
    if status == "failed":
        return f"Failed: {why}. The run is in {job.folder}, with the checkpoints from before, if any."
    if status == "stopped":
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
        try:
            report_failure(folder, rank, error)
        except OSError as trouble:  # a full disk; the failure itself still goes on to the launcher and its log
            environment.speak(f"status.json cannot be written, either: {trouble.strerror or trouble}.", error=True)
        end_loaders()
        raise
