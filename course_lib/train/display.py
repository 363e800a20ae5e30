"""Live progress: one updating display in a notebook, lines in a terminal."""

import html
import time
from typing import Any

from course_lib.train.curve import curve_image
from course_lib.train.record import TrainRun


class Progress:
    """What the display shows, as text and as HTML."""

    def __init__(self, run: TrainRun | None, seconds: float) -> None:
        self.run, self.seconds = run, seconds

    def text(self) -> str:
        """One line."""
        if self.run is None or not self.run.losses:
            return f"starting the ranks ... {self.seconds:.0f} s"
        row = self.run.rows("train")[-1]
        step, steps = row["step"], max(self.run.facts["steps"], 1)
        bar = ("█" * (20 * step // steps)).ljust(20, "░")
        accuracy = self.run.accuracy
        known = "" if accuracy is None else f"  test accuracy {accuracy:.4f}"
        note = f"  [{self.run.note}]" if self.run.note else ""
        return (
            f"{bar} step {step}/{steps}  epoch {row['epoch']}  loss {row['loss']:.4f}  "
            f"{row['samples_per_s']:,.0f} samples/s{known}  {self.seconds:.0f} s{note}"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        picture = ""
        if self.run and self.run.plan:
            picture += f"<details><summary>the plan</summary><pre>{html.escape(self.run.plan)}</pre></details>"
        if self.run and self.run.losses:
            picture += "<br>" * (not picture) + curve_image(self.run.steps, self.run.losses, self.run.facts["steps"])
        return {"text/plain": self.text(), "text/html": f"<div>{html.escape(self.text())}{picture}</div>"}


def in_notebook() -> bool:
    """Whether outputs can be updated: a kernel is there, not only a terminal."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class Live:
    """Shows Progress objects.

    At most one a second in a notebook, one line every five seconds in a terminal.
    """

    def __init__(self) -> None:
        self.notebook = in_notebook()
        self.handle = None
        self.shown = float("-inf")
        self.last = ""

    def due(self) -> bool:
        """Whether it is time for a new picture."""
        return time.monotonic() - self.shown >= (1 if self.notebook else 5)

    def show(self, progress: Progress) -> None:
        """Replace what is shown."""
        self.shown = time.monotonic()
        if not self.notebook:
            if progress.text() != self.last:
                print(progress.text(), flush=True)
            self.last = progress.text()
        elif self.handle is None:
            from IPython.display import display

            self.handle = display(progress, display_id=True)
        else:
            self.handle.update(progress)
