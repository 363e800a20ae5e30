"""A run with a button that kills a rank: `show.kill_button(...)`."""

import threading
import time
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
import psutil

from course_lib.train import notebook
from course_lib.train.display import Progress
from course_lib.train.processes import kill_rank, ranks_of
from course_lib.train.record import TrainRun


def kill_button(
    recipe: str = "digits", ranks: int = 3, *, dir: str | Path, restarts: int = 3, **options: Any
) -> "KillButton":
    """Train as `train(...)` does, in the background, under a row of buttons: each kills a rank with kill -9.

    `wait()` gives the run when it has ended; arguments are those of `train`.
    """
    return KillButton(recipe, ranks, dir, restarts, options)


class KillButton:
    """Displays itself as the last value of a cell."""

    def __init__(self, recipe: str, ranks: int, dir: str | Path, restarts: int, options: dict[str, Any]) -> None:
        args, self.folder = notebook.arguments(recipe, ranks, dir, restarts, options)
        self.kills: list[str] = []
        self.run: TrainRun | None = None
        self.problem: BaseException | None = None
        self.shown = 0.0
        self.progress = ipywidgets.HTML()
        buttons = [ipywidgets.Button(description=f"kill -9 rank {rank}") for rank in range(ranks)]
        for rank, button in enumerate(buttons):
            button.on_click(lambda _, rank=rank: self.kill(rank))
        self._widget = ipywidgets.VBox([ipywidgets.HBox(buttons), self.progress])
        self._thread = threading.Thread(target=self._train, args=(args, ranks, restarts), daemon=True)
        self._thread.start()

    def _train(self, args: list[str], ranks: int, restarts: int) -> None:
        try:
            self.run = notebook.follow(args, ranks, self.folder, None, restarts, live=self)
        except BaseException as problem:  # noqa: BLE001 - `wait` raises it, in the thread that can show it
            self.problem = problem

    def due(self) -> bool:
        """Asked by `follow`: is it time for a new picture?"""
        return time.monotonic() - self.shown >= 0.5

    def show(self, progress: Progress) -> None:
        """Called by `follow`."""
        self.shown = time.monotonic()
        said = "".join(f"<br>{escape(line)}" for line in self.kills)
        self.progress.value = progress._repr_mimebundle_()["text/html"] + said

    def kill(self, rank: int) -> None:
        """What a button does."""
        step = self._step()
        if kill_rank(self.folder, rank):
            self.kills.append(f"rank {rank} was killed after step {step}")

    def _step(self) -> int:
        try:
            return max(TrainRun.read(self.folder).steps, default=0)
        except FileNotFoundError:
            return 0

    def wait(self, rank: int = 1, step: int = 1) -> TrainRun:
        """The run, when it has ended. If nobody has pressed a button, `rank` is killed here, after `step`.

        Raises what `train` raises. The stop button of the notebook stops the ranks, and they save.
        """
        try:
            while self._thread.is_alive():
                if not self.kills and self._step() >= step:
                    self.kill(rank)
                self._thread.join(0.05)
        except KeyboardInterrupt:
            self.stop()
            raise notebook.interrupted(self.folder) from None
        if self.problem:
            raise self.problem
        assert self.run is not None
        return self.run

    def stop(self) -> None:
        """As SIGTERM from a scheduler does."""
        for process in ranks_of(self.folder)[:1]:  # the others hear of it from this one
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                break  # it has ended by itself
        self._thread.join(30)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, object]:
        live = self._widget._repr_mimebundle_()
        live = live[0] if isinstance(live, tuple) else live
        return {**live, "text/plain": "(Here are buttons that kill a rank, where a kernel runs.)"}
