"""From a notebook cell to real ranks and back: `run` for a function, `torchrun` for a program."""

from course_lib.launch.result import Message, Result

__all__ = ["Message", "Result"]
