"""A run folder of the project, as the judge reads it. What is missing or odd in it is a sentence, not a traceback.

    run = folder.read(project, "runs/slow")       raises CheckFailed: not there, not finished, not to be understood
    run.ranks, run.steps, run.losses[1], run.config.data.workers, run.rows("train")
    older, newest = checkpoints(run)[-2:]         paths, see weights.py, which also reads them

What is read is only what the folder *says*. `again.py` finds out whether it is true.
"""

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.check.project.files import (
    MEGABYTE,
    START,
    as_dict,
    content,
    is_number,
    json_object,
    metrics_rows,
    odd,
)
from course_lib.check.verdict import CheckFailed
from course_lib.launch.named import is_named
from course_lib.train.cli import parse, words
from course_lib.train.config import Config, as_json, option_names
from course_lib.train.errors import ConfigError
from course_lib.train.folder import is_locked

__all__ = ["MEGABYTE", "PROJECT", "START", "Run", "as_dict", "configuration", "content", "is_number", "odd", "read"]

PROJECT = "project.py"
MOST_RANKS = 16  # that the judge starts; more than that in config.json is an accident, or worse


@dataclass(frozen=True)
class Run:
    """A finished run, all of whose entries have the right types.

    project     the folder of project.py; name: "runs/one"; path: both together
    config      the configuration, without run.dir; own functions are "project.py:NAME", wherever the run was started
    options     the same, flat: {"optim.lr": 0.05, ...}, as `again.py` changes it
    facts       config.json as it is: "parameters", "gradient_bytes", "data", ...; look at types yourself
    ranks, steps, per_epoch   numbers of config.json
    losses      {step: mean training loss over all ranks}
    accuracies  {step: test accuracy}
    status      status.json as it is
    """

    project: Path
    name: str
    config: Config
    options: dict[str, Any] = field(repr=False)
    facts: dict[str, Any] = field(repr=False)
    ranks: int
    steps: int
    per_epoch: int
    metrics: list[dict[str, Any]] = field(repr=False)
    status: dict[str, Any] = field(repr=False)

    @property
    def path(self) -> Path:
        return self.project / self.name

    @property
    def data_name(self) -> str:
        """What was opened: another one than `config.data.name` when a download had failed."""
        opened = as_dict(self.facts.get("data")).get("name")
        return opened if isinstance(opened, str) and not is_named(opened) else self.config.data.name

    def rows(self, event: str) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl of one kind: "start", "train" or "eval", each with a step; the rest is unseen."""
        return [row for row in self.metrics if row["event"] == event]

    @property
    def losses(self) -> dict[int, float]:
        return {row["step"]: float(row["loss"]) for row in self.rows("train")}

    @property
    def accuracies(self) -> dict[int, float]:
        return {row["step"]: float(row["accuracy"]) for row in self.rows("eval")}

    @property
    def accuracy(self) -> float:
        """The newest one."""
        return self.accuracies[max(self.accuracies)]


def read(project: Path, name: str) -> Run:
    """The finished run in the folder `name` of the project; raises CheckFailed with the name of what is wrong.

    Mistakes: missing, odd_file, not_finished, other_file (a function of another file than project.py).
    """
    path = project / name
    if not (project / PROJECT).is_file():
        raise CheckFailed(f"There is no {PROJECT} in {project}: run the cell that writes it.", "missing")
    if path.is_symlink() or not path.is_dir() or not (path / "config.json").exists():
        what = "is a link and no folder" if path.is_symlink() else "is not there" if not path.exists() else "has no run"
        raise CheckFailed(f"{name} {what}: train with --run.dir {name} first.", "missing")
    facts, status = json_object(path, name, "config.json"), json_object(path, name, "status.json")
    _refuse_unfinished(path, name, status)
    config = configuration(name, facts)
    options = {f"{part}.{key}": value for part, found in as_json(config).items() for key, value in found.items()}
    ranks, steps, per_epoch = (whole(name, facts, key) for key in ("ranks", "steps", "steps_per_epoch"))
    if ranks > MOST_RANKS:
        raise CheckFailed(
            f"{name}: config.json says {ranks} ranks, and the judge starts {MOST_RANKS} at most.", "ranks"
        )
    metrics = metrics_rows(path, name)
    run = Run(project, name, config, options, facts, ranks, steps, per_epoch, metrics, status)
    _refuse_incomplete(run)
    return run


def whole(name: str, facts: dict[str, Any], key: str) -> int:
    """A whole number of at least 1 in config.json."""
    value = facts.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise odd(name, "config.json", f"{key} is {str(value)[:40]!r}")
    return value


def configuration(name: str, facts: dict[str, Any]) -> Config:
    """The options in config.json, understood as the command line would. Nothing of the learner is run for it."""
    flat: dict[str, Any] = {}
    for part, options in as_dict(facts.get("config")).items():
        flat |= {f"{part}.{option}": value for option, value in as_dict(options).items()}
    known = set(option_names())
    unknown, missing = sorted(flat.keys() - known), sorted(known - flat.keys())
    if unknown or missing:
        raise odd(name, "config.json", f"the option {(unknown or missing)[0]} is {'unknown' if unknown else 'missing'}")
    given = {option: _value(name, option, value) for option, value in flat.items() if option != "run.dir"}
    try:
        return parse(words("digits", given))
    except ConfigError as problem:
        raise odd(name, "config.json", str(problem).rstrip(".")) from None


def _value(name: str, option: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise odd(name, "config.json", f"{option} is a {type(value).__name__}")
    if not isinstance(value, str) or not is_named(value):
        return value
    file, _, function = value.rpartition(":")
    if Path(file).name != PROJECT:
        text = f"{name}: --{option} is {value}; the judge looks at the functions of {PROJECT} only. Move it there."
        raise CheckFailed(text, "other_file")
    return f"{PROJECT}:{function}"


def _refuse_unfinished(path: Path, name: str, status: dict[str, Any]) -> None:
    said, why, step = (str(status.get(key, ""))[:300] for key in ("status", "why", "step"))
    if said == "finished":
        return
    go_on = f"Start it again with the same --run.dir {name}, and it continues."
    if said == "running":
        ended = f"was killed at about step {step}, without a word. {go_on}"
        text = f"is still training, at step {step}: wait until it has finished." if _at_work(path) else ended
    elif said == "stopped":
        text = f"was stopped at step {step} ({why}). {go_on}"
    elif said == "failed":
        text = f"has failed at step {step}: {why}. Mend that, then: {go_on}"
    else:
        raise odd(name, "status.json", f"the status is {said[:40]!r}")
    raise CheckFailed(f"{name} {text}", "not_finished")


def _at_work(path: Path) -> bool:
    lock = path / ".lock"
    try:
        return lock.exists() and stat.S_ISREG(lock.lstat().st_mode) and is_locked(path)
    except OSError:  # a folder that may only be read: nobody trains in it
        return False


def _refuse_incomplete(run: Run) -> None:
    """All that every finished run has."""
    for event in ("start", "train", "eval"):
        if not run.rows(event):
            raise odd(run.name, "metrics.jsonl", f"it has no row {event!r}")
    for event in ("train", "eval"):
        if (last := run.rows(event)[-1]["step"]) != run.steps:
            raise odd(run.name, "metrics.jsonl", f"the last row {event!r} is of step {last}, and {run.steps} are done")
