"""The slow disk of the project: is it still as slow as it was given?"""

import time
from pathlib import Path

from course_lib.check.alone import start
from course_lib.check.project.folder import PROJECT
from course_lib.check.verdict import CheckFailed
from course_lib.launch import RunError, run
from course_lib.launch.named import function

SAMPLES = 40
LEAST = 1.8  # ms: a sleep of 2 ms is never shorter, and without it some sample comes at once, also on a busy machine


def refuse_mended_disk(project: Path) -> None:
    """Raises CheckFailed, "disk_mended", when a sample comes too fast."""
    try:
        found = run(
            fastest, 1, args=(str(project.resolve() / PROJECT),), timeout=20, quiet=True, start=start()
        ).results[0]
    except RunError as error:
        raise CheckFailed(f"slow_disk of {PROJECT} does not work.\n{error}", "does_not_run_again") from None
    if not found >= LEAST:
        raise CheckFailed(
            f"The slow disk of {PROJECT} gives a sample in {found:.2f} ms, and it was given with a sleep of 2 ms. It "
            "is the disk that you have: bring `SlowDisk` back, and load from it while something is computed.",
            "disk_mended",
        )


def fastest(file: str) -> float:
    """Milliseconds, of the quickest of some samples. In a process of its own: it runs the learner's code."""
    samples, _, _ = function(f"{file}:slow_disk")()
    times = []
    for index in range(SAMPLES):
        began = time.perf_counter()
        samples[index]
        times.append(1000 * (time.perf_counter() - began))
    return min(times)
