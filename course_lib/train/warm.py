"""For the agent, which imports this before it forks ranks of the loop: all that they need, and a line that was read.

tyro imports some of itself, and compiles its patterns, when it reads its first line.
"""

import course_lib.train.main  # noqa: F401
from course_lib.train.cli import parse

parse(["digits"])
