"""ring_all_reduce of project.py, judged as exercise 03 judges it, but for the division: here it only sums."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.check.engine import judge
from course_lib.check.group import GroupCase
from course_lib.check.project.folder import PROJECT
from course_lib.check.specs.ring_all_reduce import SPEC
from course_lib.check.verdict import CheckFailed
from course_lib.launch.named import function

NAME = "ring_all_reduce"


class Named:
    """A function of project.py, found in the rank that calls it: the judge itself runs nothing of the learner."""

    def __init__(self, project: Path, name: str) -> None:
        self.file, self.__name__ = str(project.resolve() / PROJECT), name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.find()(*args, **options)

    def find(self) -> Callable[..., Any]:
        """The function itself. Raises NoFunction when it is not there."""
        return function(f"{self.file}:{self.__name__}")


def sums(rng: random.Random) -> list[GroupCase]:
    """The cases of exercise 03 without the mean, and so without an `op`."""
    found = [case for case in SPEC.cases(rng) if case.options.get("op") != "mean"]
    return [replace(case, story=case.story.replace(", op='sum'", ""), options={}) for case in found]


def refuse_wrong_ring(project: Path) -> None:
    """Raise CheckFailed, with the sentence that exercise 03 has for the mistake, when it is not right."""
    try:
        judge(replace(SPEC, cases=sums), Named(project, NAME))
    except CheckFailed as problem:
        raise CheckFailed(f"{NAME} of {PROJECT}, as in exercise 03: {problem}", problem.mistake) from None
