"""The trace of a run folder, as the judge reads it: what ranks spend a step on, and how often they go forward."""

from dataclasses import dataclass
from statistics import mean

from course_lib.check.project.files import MEGABYTE, content, odd
from course_lib.check.project.folder import Run
from course_lib.check.specs.where_time_oracle import table
from course_lib.check.verdict import CheckFailed
from course_lib.parallel.traces import Spans, spans_of, without_waiting

LARGEST = 128 * MEGABYTE  # of one rank's trace
THIEVES = {"data": "data", "communication": "exposed"}  # what a thief is called: the part of the table of exercise 11


@dataclass(frozen=True)
class Reading:
    """ranks: milliseconds of each by part, see exercise 11, waiting as idle; passes: forwards of a rank in a step."""

    ranks: dict[int, dict[str, float]]
    steps: int
    passes: float

    @property
    def milliseconds(self) -> float:
        """Of all recorded steps."""
        return sum(next(iter(self.ranks.values())).values())

    def share(self, part: str) -> float:
        """Of the step, mean over the ranks."""
        return mean(parts[part] for parts in self.ranks.values()) / self.milliseconds

    @property
    def thief(self) -> str:
        """The larger part of those that a good loop has hardly any of."""
        return max(THIEVES, key=lambda name: self.share(THIEVES[name]))


def reading(spans: Spans) -> Reading:
    """From spans of at least one whole step."""
    ranks = {rank for rank, *_ in spans}
    steps = sum(kind == "optimizer" for _, kind, *_ in spans) / len(ranks)
    forwards = sum(kind == "forward" for _, kind, *_ in spans) / len(ranks)
    return Reading(table(without_waiting(spans)), round(steps), forwards / steps)


def recorded(run: Run) -> Reading:
    """What the traces of a run say. Raises CheckFailed: no_trace, odd_file, foreign_trace."""
    spans: Spans = []
    for rank in range(run.ranks):
        if not (run.path / "traces" / f"rank_{rank}.json").exists():
            raise CheckFailed(
                f"{run.name}/traces has no rank_{rank}.json: train with --measure.profile_at 20, in a new folder.",
                "no_trace",
            )
        text = content(run.path / "traces" / f"rank_{rank}.json", run.name, LARGEST)
        try:
            spans += spans_of(rank, text)
        except ValueError as problem:
            raise odd(run.name, f"traces/rank_{rank}.json", str(problem).rstrip(".")) from None
    found = reading(spans)
    if abs(found.passes - run.config.data.accumulate) > 0.5:
        raise CheckFailed(
            f"{run.name}: a rank goes forward {found.passes:g} times a step in the traces, and {run.name}/config.json "
            f"says {run.config.data.accumulate}. These traces are of another run: train anew.",
            "foreign_trace",
        )
    return found
