"""Ring to DDP: the library behind the course.

`run` starts a function on N real ranks, `train` starts the training loop, `show` draws what a run did and
`check` judges an exercise. They are loaded on first use, so that `import course_lib` stays quick.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib import check, show
    from course_lib.launch import run
    from course_lib.train import train

__version__ = "0.1.0"
__all__ = ["run", "train", "show", "check"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'course_lib' has no attribute {name!r}")
    if name == "run":
        from course_lib.launch import run

        return run
    return import_module(f"course_lib.{name}")  # `train` is a package that can be called, see its __init__


if "ipykernel" in sys.modules:  # in a notebook: warm up while the learner reads
    from course_lib.launch import prewarm

    prewarm()
