"""Many answers in one start of processes: starting ranks costs more than most of these checks."""

import sys
from dataclasses import replace

import cloudpickle
import pytest

from course_lib.check.group import Evidence
from course_lib.check.together import collect

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Answers(dict):
    """Of a number, the answer; in the rank, called as one answer would be, the one with that number."""

    def __call__(self, tensor, number, **options):
        return self[number](tensor, **options)


def one_of_many(answers, tensor, number, drive, **options):
    """In the rank: a driven case of one of the answers."""
    return drive(answers[number], tensor, **options)


def evidence_of(answers: dict) -> dict:
    """For each key, with (answer, its cases): the evidence of these cases alone. All must come to their end."""
    rows = [(key, number, case) for key, (_, cases) in answers.items() for number, case in enumerate(cases)]
    rows.sort(key=lambda row: -row[2].world)
    chosen = Answers({key: answer for key, (answer, _) in answers.items()})
    e = Evidence([_of_many(case, key) for key, _, case in rows])
    collect(chosen, e, range(len(rows)), 200.0)
    assert not e.broken, e.broken
    found = {key: Evidence(list(cases)) for key, (_, cases) in answers.items()}
    for k, (key, number, _) in enumerate(rows):
        one = found[key]
        one.answers[number], one.messages[number], one.zero[number] = e.answers[k], e.messages[k], e.zero[k]
    return found


def _of_many(case, key):
    if case.drive is None:
        return replace(case, options=case.options | {"number": key})
    return replace(case, drive=one_of_many, options=case.options | {"number": key, "drive": case.drive})


@pytest.fixture(scope="session")
def many():
    """The function `evidence_of`."""
    return evidence_of
