"""What an exercise asks for, as data: cases, the right answers, and the mistakes that people make."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One call of the learner's function."""

    group: str  # what this case tests; all cases of a group share one line of the verdict
    story: str  # the situation, in words: "2 nodes with 4 GPUs each, rank 5"
    inputs: tuple
    expected: Any  # the value, or an exception type that must be raised


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer. `fits` sees the case and the answer, and says whether it is this mistake."""

    name: str
    fits: Callable[[Case, "Answer"], bool]
    says: str  # what is wrong, why, and where to look


@dataclass(frozen=True)
class Answer:
    """What the learner's function did in one case."""

    value: Any = None
    error: str | None = None  # the type of the exception that it raised
    message: str = ""
    where: str = ""
    kinds: tuple[str, ...] = ()  # that type and those it derives from


@dataclass(frozen=True)
class Spec:
    """One exercise. `cases` makes fresh ones from a random generator, so that nobody can learn them by heart."""

    name: str
    function: str
    points: int
    cases: Callable[[random.Random], list[Case]]
    mistakes: tuple[Mistake, ...]
    compare: Callable[[Case, Answer], str | None]  # None when right, else what differs, in words
    seconds: float = 10.0


@dataclass(frozen=True)
class FolderSpec:
    """A stage of a project: what the learner made lies in a folder, and is looked at and run again there.

    `stage` gets the folder, and what the learner's function returned when there is one. It returns the lines of the
    verdict, or raises CheckFailed.
    """

    name: str
    stage: Callable[..., list[str]]
    points: int
    label: str  # the stage, in the table of `course check`
    function: str = ""  # the learner's function of no arguments whose answer is judged, too; "": there is none
    seconds: float = 10.0  # for that function
