"""Exercises 05 and 06: a wrong answer is tried in the one case in which it shows. A whole check would take longer."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest

from course_lib.check import CheckFailed, engine
from course_lib.check.group import Evidence, GroupCase, GroupSpec


@dataclass(frozen=True, eq=False)
class Exercise:
    """What the tests of one exercise need.

    groups    {mistake: the group of its case}; `usual`, if it is not here
    shown     the same for single answers, by the answer
    breaking  mistakes whose answers do not come to their end
    full      mistakes whose first answer is seen as learners see it: by the whole check
    always    groups of cases that every right answer is tried in; of the others each is tried in half
    """

    spec: GroupSpec
    mistakes: ModuleType
    groups: dict[str, str]
    shown: dict[Any, str]
    usual: str
    breaking: tuple[str, ...]
    full: tuple[str, ...]
    always: tuple[str, ...]
    _refused: dict[Any, CheckFailed] = field(default_factory=dict)  # what was said already

    @property
    def wrong(self) -> list[tuple[str, Any]]:
        """(mistake, answer) of each wrong answer."""
        return [*self.mistakes.WRONG.items(), *self.mistakes.AGAIN]

    def refused(self, answer: Any, group: str | None = None) -> CheckFailed:
        """What the check says of an answer, in one case or in all."""
        if (answer, group) not in self._refused:
            spec = replace(self.spec, cases=lambda rng: [self.case(group)]) if group else self.spec
            with pytest.raises(CheckFailed) as caught:
                engine.judge(spec, answer)
            self._refused[answer, group] = caught.value
        return self._refused[answer, group]

    def sentence(self, seen: dict[int, Evidence], answer: Any) -> str:
        """What is said of an answer that came to its end."""
        evidence = seen[next(k for k, (_, each) in enumerate(self.wrong) if each is answer)]
        told = self.spec.compare(evidence)
        return f"{told.text} {engine._named(self.spec, evidence, told)[1]}"

    @cached_property
    def _sets(self) -> list[list[GroupCase]]:
        return [self.spec.cases(random.Random(seed)) for seed in range(3)]

    def case(self, group: str, seed: int = 0) -> GroupCase:
        """The first case of this group, of one of three sets: to make them takes longer than some runs."""
        return next(case for case in self._sets[seed % 3] if case.group == group)

    def group_of(self, name: str, answer: Any) -> str:
        """Of the case in which it shows."""
        return self.shown.get(answer) or self.groups.get(name, self.usual)

    def whole(self, name: str, answer: Any) -> bool:
        """Whether it is seen by the whole check."""
        return name in self.full and answer is self.mistakes.WRONG[name]

    def seen_wrong(self, many: Callable) -> dict[int, Evidence]:
        """What is seen of the wrong answers that come to their end, by their numbers."""
        ending = [
            (k, name, answer)
            for k, (name, answer) in enumerate(self.wrong)
            if name not in self.breaking and not self.whole(name, answer)
        ]
        return many({k: (answer, [self.case(self.group_of(name, answer), k)]) for k, name, answer in ending})

    def seen_right(self, many: Callable) -> dict[str, Evidence]:
        """What is seen of the right answers, the same in each run; all together see every case."""
        right = enumerate(self.mistakes.RIGHT.items())
        return many({name: (answer, self._some(k)) for k, (name, answer) in right})

    def _some(self, turn: int) -> list[GroupCase]:
        """Of one of three sets the cases for every right answer, and every second one of the others."""
        chosen = self._sets[turn % 3]
        return [case for at, case in enumerate(chosen) if case.group in self.always or (at + turn) % 2]

    def assert_named(self, number: int, seen: dict[int, Evidence]) -> None:
        """A wrong answer is refused by the name of its mistake."""
        name, answer = self.wrong[number]
        if number in seen:
            told = self.spec.compare(seen[number])
            named = engine._named(self.spec, seen[number], told)
            assert named and named[0].name == name, told
        else:
            found = self.refused(answer, None if self.whole(name, answer) else self.group_of(name, answer))
            assert found.mistake == name, str(found)
