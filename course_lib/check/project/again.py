"""Short parts of a run, run again by the judge: with its configuration, in a folder that is gone afterwards.

    with again.room(project) as room:
        first = room.part(run, until=8)                                # the first 8 steps, as many ranks as `run` had
        exact = room.part(run, until=8, ranks=1, changes={"model.dtype": "float64", "run.save_every": 1})
        last = room.part(run, until=run.steps, after=older)            # on from a checkpoint of the run
        broken = room.killed(run, at=5)                                # rank 1 gets kill -9 after about 5 steps
        whole = room.part(run, until=20, into=broken.path)             # ... and the same run is continued

    first.losses[1], last.accuracies[180], exact.rows, exact.weights(3)

Each is a torchrun of `course_lib.train` in the project's folder, forked from the warm agent where that is safe: about
a CPU-second a rank to start, and then the steps. They need the judge's machine for themselves: one at a time.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from course_lib.check.project.folder import PROJECT, Run
from course_lib.check.project.kill import Killer
from course_lib.check.project.said import why_failed
from course_lib.check.verdict import CheckFailed
from course_lib.launch import scratch, torchrun
from course_lib.train import checkpoint
from course_lib.train.cli import parse, words
from course_lib.train.config import as_json
from course_lib.train.folder import write_json
from course_lib.train.manifest import read
from course_lib.train.metrics import read_rows
from course_lib.train.status import read_status

SECONDS = 90.0  # for one part, which should take a few
# How the judge runs: all rows, nothing measured beside, and none of what takes long to start. It changes the last bits
# at most. `changes` go before.
PLAIN = {
    "run.log_every": 1, "run.save_every": 0, "run.keep": 2, "run.save_in_background": False, "run.max_minutes": 0.0,
    "run.timeout": 30.0, "run.first_timeout": 60.0, "run.stall": 0.0, "data.workers": 0, "model.compile": "no",
    "measure.tensorboard": False, "measure.profile_at": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a part came to. rows: those of its metrics.jsonl, with times; readable as long as the room is there."""

    path: Path
    rows: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        """{step: mean training loss over all ranks}"""
        return {row["step"]: row["loss"] for row in self.rows if row["event"] == "train"}

    @property
    def accuracies(self) -> dict[int, float]:
        """{step: test accuracy}, for each epoch that came to its end"""
        return {row["step"]: row["accuracy"] for row in self.rows if row["event"] == "eval"}

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are there."""
        return [checkpoint.step_of(path) for path in checkpoint.saved(self.path)]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """The network's parameters and buffers after a step whose checkpoint is there."""
        return checkpoint.decode(read(self.path / "checkpoints" / f"step_{step:08d}")["state.pt"])["model"]


@contextmanager
def room(project: Path) -> Iterator["Room"]:
    """A place for parts of the runs of one project. All is removed at the end, however that comes."""
    with tempfile.TemporaryDirectory(prefix="again-", dir=scratch()) as place:
        yield Room(project.resolve(), Path(place))


class Room:
    """See above. A part that does not come to its end raises CheckFailed: "does_not_run_again" or "too_slow"."""

    def __init__(self, project: Path, place: Path) -> None:
        self.project, self.place, self.count = project, place, 0

    def part(
        self,
        run: Run,
        until: int,
        ranks: int | None = None,
        *,
        changes: dict[str, Any] | None = None,
        after: Path | None = None,
        into: Path | None = None,
        seconds: float = SECONDS,
    ) -> Part:
        """Train up to and with step `until`; a checkpoint is there afterwards.

        ranks    as many as `run` had, unless said; then `data.batch` follows from `data.global_batch`
        changes  options that differ from those of `run`: {"data.name": "digits"}
        after    the folder of a checkpoint of `run`, step_*, from which this goes on; else from the first step
        into     the path of a `killed` part, to be continued there
        """
        path = into or self._folder(run, after, ranks, changes)
        self._launch(run, path, ranks, {**(changes or {}), "run.stop_after": until}, seconds)
        said = read_status(path)
        if said.get("status") not in ("finished", "stopped"):
            self._complain(run, path, said)
        part = Part(path, read_rows(path / "metrics.jsonl"))
        if part.rows[-1]["step"] != until:
            last = part.rows[-1]["step"]
            text = (
                f"{run.name}: config.json says that there are {run.steps} steps, and by its options there are {last}."
            )
            raise CheckFailed(text, "odd_file")
        return part

    def killed(self, run: Run, at: int, *, changes: dict[str, Any] | None = None, seconds: float = SECONDS) -> Part:
        """Train from the first step until some step from `at` on, in which the last rank gets kill -9."""
        path = self._folder(run, None, None, changes)
        killer = Killer(path, at, run.ranks - 1)
        killer.start()
        try:
            self._launch(run, path, None, changes, seconds)
        finally:
            killer.stop()
        if not killer.done and (said := read_status(path)).get("status") == "finished":
            text = f"{run.name} is over before the judge can kill it: {run.steps} steps are too few. Take more epochs."
            raise CheckFailed(text, "too_short")
        if not killer.done:
            self._complain(run, path, said)
        return Part(path, read_rows(path / "metrics.jsonl"))

    def _folder(self, run: Run, after: Path | None, ranks: int | None, changes: dict[str, Any] | None) -> Path:
        self.count += 1
        path = self.place / f"part_{self.count}"
        if after is not None:
            copy = path / "checkpoints" / after.name
            copy.mkdir(parents=True)
            for name in ("state.pt", "manifest.json"):
                shutil.copyfile(after / name, copy / name)
            config = as_json(parse(self._words(run, path, ranks, changes)))
            write_json(path / "config.json", {"config": config, "data": {"name": run.data_name}})
        return path

    def _words(self, run: Run, path: Path, ranks: int | None, changes: dict[str, Any] | None) -> list[str]:
        moved = {} if ranks in (None, run.ranks) else {"data.batch": 0}
        return words(
            "digits", {**run.options, "run.stop_after": None, **PLAIN, **moved, **(changes or {}), "run.dir": path}
        )

    def _launch(self, run: Run, path: Path, ranks: int | None, changes: dict[str, Any] | None, seconds: float) -> None:
        line = ["-m", "course_lib.train", *self._words(run, path, ranks, changes)]
        env = {"PYTHONDONTWRITEBYTECODE": "1"}  # leave nothing in the project's folder
        log = self._log(path)
        try:
            torchrun(
                line, ranks=ranks or run.ranks, log=log, cwd=self.project, env=env, timeout=seconds, grace=3,
                module="course_lib.train.warm",
            )  # fmt: skip
        except TimeoutError:
            rows = read_rows(path / "metrics.jsonl")
            step = rows[-1]["step"] if rows else 0
            slow = (
                "Look whether the machine is busy with something else; otherwise take a smaller network, or "
                "--run.save_every for checkpoints that are less far apart."
            )
            stuck = f"Does {PROJECT} wait for something, or end the process, when it is imported?"
            raise CheckFailed(
                f"{run.name}: run again, {ranks or run.ranks} ranks came to step {step} in {seconds:.0f} s, and the "
                f"judge does not wait longer. {slow if step else stuck}",
                "too_slow",
            ) from None

    def _log(self, path: Path) -> Path:
        return self.place / f"{path.name}.log"

    def _complain(self, run: Run, path: Path, said: dict[str, Any]) -> None:
        log = self._log(path)
        why = said.get("why") or why_failed(log.read_text(errors="replace") if log.exists() else "")
        text = f"{run.name}: its configuration, run again with the {PROJECT} of now, fails: {why}"
        raise CheckFailed(text, "does_not_run_again")
