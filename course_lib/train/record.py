"""A run folder read back: what `train()` returns, and what pictures are drawn from."""

import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.train.curve import curve_image
from course_lib.train.folder import is_locked
from course_lib.train.launches import Launch, launches
from course_lib.train.metrics import read_rows
from course_lib.train.status import outcome, read_status


@dataclass
class TrainRun:
    """One run, as its folder tells it.

    dir      the run folder
    config   the options, nested: config["optim"]["lr"]
    facts    config.json as a whole: data, ranks, backend, device, steps, parameters, gradient_bytes, ...
    metrics  the rows of metrics.jsonl; row["event"] is "start", "train" or "eval"
    status   "running", "finished", "stopped", "failed", or "killed" when the processes ended without a word
    why      the reason, in words; empty when it finished
    details  status.json as a whole: step, steps, rank and traceback of a failure, ...
    """

    dir: Path
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)
    status: str = "running"
    why: str = ""
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, folder: Path | str) -> "TrainRun":
        """Read a run folder; raises FileNotFoundError when it holds no run."""
        folder = Path(folder)
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} holds no run: there is no config.json in it.")
        facts = json.loads((folder / "config.json").read_text())
        details = read_status(folder)
        status, why = outcome(details, at_work=lambda: is_locked(folder))
        return cls(folder, facts["config"], facts, read_rows(folder / "metrics.jsonl"), status, why, details)

    def rows(self, event: str) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return [row for row in self.metrics if row["event"] == event]

    @property
    def launches(self) -> list[Launch]:
        """Each start of the run, from where, on how many ranks, and how it ended; the oldest first."""
        last = self.metrics[-1]["step"] if self.metrics else 0
        newest = {"status": self.status, "why": self.why, "step": last, "time": self.details.get("time")}
        return launches(self.metrics, newest)

    @property
    def steps(self) -> list[int]:
        """The steps that `losses` belong to."""
        return [row["step"] for row in self.rows("train")]

    @property
    def losses(self) -> list[float]:
        """Mean training loss over all ranks, for each row."""
        return [row["loss"] for row in self.rows("train")]

    @property
    def accuracy(self) -> float | None:
        """The newest test accuracy, or None before the first evaluation."""
        return next((row["accuracy"] for row in reversed(self.rows("eval"))), None)

    @property
    def samples_per_s(self) -> float | None:
        """The median speed over all rows, all ranks together."""
        speeds = sorted(row["samples_per_s"] for row in self.rows("train"))
        return speeds[len(speeds) // 2] if speeds else None

    @property
    def plan(self) -> str:
        """What the loop has printed before its first step, one line for each derived number; empty before that."""
        starts = self.rows("start")
        return starts[-1].get("plan", "") if starts else ""

    @property
    def note(self) -> str:
        """What every picture of this run must say (synthetic data, a fallback); usually empty."""
        return self.facts.get("data", {}).get("note", "")

    def summary(self) -> str:
        """The run in one line."""
        rows = self.rows("train")
        parts = [f"{self.facts.get('recipe', 'run')} on {self.facts.get('ranks', '?')} ranks: {self.status}"]
        if rows:
            parts.append(f"step {rows[-1]['step']}/{self.facts.get('steps', '?')}")
            parts.append(f"loss {rows[-1]['loss']:.4f}")
        if self.accuracy is not None:
            parts.append(f"test accuracy {self.accuracy:.4f}")
        if self.samples_per_s:
            parts.append(f"{self.samples_per_s:,.0f} samples/s")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts) + (f" ({self.why})" if self.why else "")

    def __repr__(self) -> str:
        return f"<TrainRun {self.dir}: {self.summary()}>"

    def _repr_html_(self) -> str:
        picture = curve_image(self.steps, self.losses, self.facts.get("steps", 0))
        folder = html.escape(str(self.dir))
        return f"<div>{html.escape(self.summary())}<br>{picture}<br><code>{folder}</code></div>"
