"""The training loop of the course: the same from one laptop process to a cluster.

    torchrun --standalone --nproc-per-node=2 -m course_lib.train digits      from a terminal, see __main__
    train("digits", ranks=2, **{"optim.lr": 0.1})                            from a notebook, see notebook.py

Both have the name `course_lib.train`, so this package is also a function: calling it is calling
`notebook.train`.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.train.record import TrainRun


class _CallableModule(ModuleType):
    """A module that can be called. Python looks up `__call__` on the class, never on the module itself."""

    def __call__(
        self,
        recipe: str = "digits",
        ranks: int = 2,
        timeout: float | None = None,
        dir: str | Path | None = None,
        restarts: int = 0,
        **options: Any,
    ) -> "TrainRun":
        """Train on `ranks` processes and return the run: see `course_lib.train.notebook.train`.

        Options are those of the command line: train("digits", ranks=2, **{"optim.lr": 0.1}).
        """
        from course_lib.train.notebook import (
            train,  # torch and IPython are not imported before they are needed
        )

        return train(recipe, ranks, timeout, dir, restarts, **options)


sys.modules[__name__].__class__ = _CallableModule
