"""`take_part` for cases with a driver: the agent imports this module once, and with it what DDP and optimizers need.

Otherwise each rank would import that for itself, on first use, which takes CPU seconds.
"""

import sys

from course_lib.check import in_rank

if "course_lib.launch.rank" in sys.modules:  # the agent has it; a kernel, which only names take_part, need not wait
    import torch._dynamo
    import torch.nn.parallel  # noqa: F401


def take_part(fn, script: list[tuple], folder: str, cells: dict[str, str]) -> None:
    """See `in_rank.take_part`."""
    in_rank.take_part(fn, script, folder, cells)
