"""From a notebook cell to real ranks and back: `run` for a function, `torchrun` for a program."""

from course_lib.launch.errors import RunError, RunInterrupted
from course_lib.launch.notebook_run import run
from course_lib.launch.program import torchrun
from course_lib.launch.result import Message, Result
from course_lib.launch.supervise import prewarm, scratch, shutdown

__all__ = ["Message", "Result", "RunError", "RunInterrupted", "prewarm", "run", "scratch", "shutdown", "torchrun"]
