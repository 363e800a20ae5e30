"""How a rank ends, as a number: the one place where exit codes are explained.

torchrun turns every code but 0 into 1, so whether a run was a success is judged by status.json, which says it in
words. Under `torchrun --max-restarts=N` a run that was told to stop ends with 0, too: any other code would make
torchrun start it again at once.
"""

import os

FINISHED = 0  # all steps are done
FAILED = 1  # an exception, a loss that is no number, a rank that is gone: status.json names the rank and the reason
REFUSED = 2  # cannot start: one sentence says why, and nothing was written
CANNOT_WRITE = 74  # EX_IOERR of sysexits.h: the disk is full or may not be written; older checkpoints are whole
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a signal, run.max_minutes or run.stop_after; saved, to be continued

IN_WORDS = (
    "0 finished, 1 failed, 2 cannot start, 74 the run folder cannot be written, "
    "75 stopped: start again with the same --run.dir"
)


def stopped() -> int:
    """The code of a run that was told to stop: one that no launcher takes for a failure to be restarted."""
    return FINISHED if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else STOPPED
