"""Exercise 16, the stages with numbers: each wrong answer gets its own verdict, and no right one is refused."""

import importlib.util
import random
import sys
from pathlib import Path

import cloudpickle
import pytest

from course_lib.check import CheckFailed, engine
from course_lib.check.project import again, report
from course_lib.check.project.evidence import refuse_evidence
from course_lib.check.project.folder import Run
from course_lib.check.project.plan import PLAN, right
from course_lib.check.project.spans import Reading, reading
from course_lib.check.spec import Answer
from course_lib.train.config import Config

_path = Path(__file__).parents[1] / "mistakes" / "project_plan.py"
_spec = importlib.util.spec_from_file_location("mistakes_project_plan", _path)
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)
sys.modules["mistakes_project_plan"] = mistakes
cloudpickle.register_pickle_by_value(mistakes)

SEEDS = range(6)
PARTS = ("compute", "exposed", "data", "idle")
WRONG = {name: function for name, function in mistakes.WRONG.items() if name != "stub"}


def parts(*milliseconds):
    return dict(zip(PARTS, milliseconds, strict=True))


def made(name, ranks, speeds, shares, **more):
    """A run with these rows of training, as the judge has it after reading."""
    columns = {"samples_per_s": speeds, "comm_share": shares, **more}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    metrics = [{"event": "train", "step": step, "loss": 1.0, **row} for step, row in enumerate(rows, 1)]
    return Run(Path(), name, Config(), {}, {}, ranks, len(rows), len(rows), metrics, {})


def first_failure(function, seed):
    """(name or None, text) of the first case that is not right, as the engine finds it; without processes."""
    for case in PLAN.cases(random.Random(seed)):
        try:
            answer = Answer(function(*case.inputs))
        except (ArithmeticError, ValueError, AttributeError) as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            answer = Answer(error=type(error).__name__, message=str(error), kinds=kinds)
        if wrong := PLAN.compare(case, answer):
            failed = engine._failure(PLAN, case, answer, wrong)
            return failed.mistake, str(failed)
    return None


@pytest.mark.parametrize("name", WRONG)
def test_wrong_plan_is_named(name):
    for seed in SEEDS:
        found = first_failure(WRONG[name], seed)
        assert found and found[0] == name, (seed, found)


@pytest.mark.parametrize("name", mistakes.UNNAMED)
def test_other_wrong_plans_are_refused(name):
    function, text = mistakes.UNNAMED[name]
    mistake, told = first_failure(function, 0)
    assert mistake is None and text in told


@pytest.mark.parametrize("name", mistakes.RIGHT)
def test_right_plans_pass(name):
    for seed in SEEDS:
        assert first_failure(mistakes.RIGHT[name], seed) is None


def test_every_named_mistake_of_a_plan_has_an_example():
    assert {mistake.name for mistake in PLAN.mistakes} == set(WRONG)


def test_a_plan_by_hand():
    plan, expected = right(*mistakes.EXPECTED["inputs"]), mistakes.EXPECTED["plan"]
    assert plan.keys() == expected.keys()
    for key, value in expected.items():
        assert plan[key] == (pytest.approx(value) if isinstance(value, float) else value)


# evidence(): made readings, in which every mistake has another value.

SLOW = Reading({0: parts(40, 7, 60, 13), 1: parts(44, 5, 64, 7)}, steps=3, passes=4.0)
FAST = Reading({0: parts(40, 7, 3, 10), 1: parts(44, 5, 2, 9)}, steps=3, passes=1.0)
BUSY = Reading({0: parts(40, 70, 20, 13), 1: parts(44, 68, 22, 9)}, steps=3, passes=4.0)
SHARE = 62 / 120
TOLD = {"thief": "data", "share": SHARE, "passes": 4}
EVIDENCE = {
    "shape": [None, "data", {"thief": "data"}, TOLD | {"share": "half"}, TOLD | {"passes": None}],
    "network_blamed": [TOLD | {"thief": "communication"}],
    "work_blamed": [TOLD | {"thief": "compute"}],
    "idle_blamed": [TOLD | {"thief": "idle"}],
    "thief": [TOLD | {"thief": "disk"}, TOLD | {"thief": ["data"]}, TOLD | {"thief": None}],
    "per_cent": [TOLD | {"share": 100 * SHARE}],
    "milliseconds": [TOLD | {"share": 62}, TOLD | {"share": 62 / 3}],
    "steps_mixed": [TOLD | {"share": 3 * SHARE}, TOLD | {"share": SHARE / 3}],
    "ranks_added": [TOLD | {"share": 2 * SHARE}],
    "of_compute": [TOLD | {"share": 62 / 42}],
    "compute_share": [TOLD | {"share": 42 / 120}],
    "fast_trace": [TOLD | {"share": 2.5 / 60}],
    "share": [TOLD | {"share": 0.61}, TOLD | {"share": -SHARE}],
    "passes_of_all_steps": [TOLD | {"passes": 12}],
    "passes_of_all_ranks": [TOLD | {"passes": 8}],
    "passes_of_all": [TOLD | {"passes": 24}],
    "one_pass": [TOLD | {"passes": 1}],
    "passes": [TOLD | {"passes": 5}],
}


@pytest.mark.parametrize("mistake", EVIDENCE)
def test_wrong_evidence_is_named(mistake):
    for told in EVIDENCE[mistake]:
        with pytest.raises(CheckFailed) as caught:
            refuse_evidence(told, SLOW, FAST)
        assert caught.value.mistake == mistake, (told, str(caught.value))


@pytest.mark.parametrize("share", [SHARE, SHARE + 0.04, SHARE - 0.04])
def test_right_evidence_passes(share):
    refuse_evidence(TOLD | {"share": share, "passes": 4.0, "note": "mine"}, SLOW, FAST)


def test_a_trace_of_a_busy_machine_is_not_the_learner_s_fault():
    with pytest.raises(CheckFailed, match="busy") as caught:
        refuse_evidence(TOLD, BUSY, FAST)
    assert caught.value.mistake == "busy_trace"


def test_a_reading_of_spans_by_hand():
    """Two ranks, one step of 100: rank 1 loads 20 longer, and rank 0 waits for it in its communication."""
    spans = [(0, "data", 0, 20000), (0, "forward", 20000, 50000), (0, "backward", 50000, 60000)]
    spans += [(0, "communication", 60000, 90000), (0, "optimizer", 90000, 100000)]
    spans += [(1, "data", 0, 40000), (1, "forward", 40000, 70000), (1, "backward", 70000, 80000)]
    spans += [(1, "communication", 80000, 90000), (1, "optimizer", 90000, 100000)]
    found = reading(spans)
    assert (found.steps, found.passes, found.milliseconds) == (1, 1.0, 100.0)
    assert found.share("data") == pytest.approx(0.3) and found.share("exposed") == pytest.approx(0.1)
    assert found.share("compute") == pytest.approx(0.5) and found.thief == "data"


# conclusions(): made runs. Their medians are 100 and 180 samples/s.

ONE = made("runs/one", 1, [90, 100, 100, 130, 95], [0.01] * 5)
DDP = made("runs/ddp", 2, [170, 180, 200, 210, 110], [0.2, 0.25, 0.3, 0.35, 0.12], overlap=[0.7] * 5)
OTHER = made("runs/slow", 2, [50] * 5, [0.45] * 5)
RUNS = {run.name: run for run in (ONE, DDP, OTHER)}
ENDS = {"speedup": 1.8, "efficiency": 0.9, "comm_share": 0.25, "predicted_speedup": 1.5, "off_by": 1.2}
CONCLUSIONS = {
    "upside_down": [{"speedup": 1 / 1.8}],
    "efficiency_for_speedup": [{"speedup": 0.9}],
    "not_the_median": [{"speedup": 174 / 103}, {"speedup": 210 / 130}, {"speedup": 110 / 95}, {"comm_share": 0.12}],
    "speedup": [{"speedup": 3}],
    "per_cent": [{"efficiency": 90}, {"comm_share": 25}],
    "speedup_for_efficiency": [{"efficiency": 1.8}],
    "efficiency": [{"efficiency": 0.7}],
    "overlap_for_share": [{"comm_share": 0.7}],
    "of_another_run": [{"comm_share": 0.45}],
    "comm_share": [{"comm_share": 0.6}],
    "no_prediction": [{"predicted_speedup": 0}, {"predicted_speedup": -1.5}],
    "off_upside_down": [{"off_by": 1.5 / 1.8}],
    "difference": [{"off_by": 0.3}],
    "off_by": [{"off_by": 2}],
}


def concluded(change):
    told = ENDS | change
    report.refuse_speedup(told, ONE, DDP)
    report.refuse_share(told["comm_share"], RUNS)
    report.refuse_prediction(told)


@pytest.mark.parametrize("mistake", CONCLUSIONS)
def test_wrong_conclusions_are_named(mistake):
    for change in CONCLUSIONS[mistake]:
        with pytest.raises(CheckFailed) as caught:
            concluded(change)
        assert caught.value.mistake == mistake, (change, str(caught.value))


@pytest.mark.parametrize("change", [{}, {"speedup": 1.81, "efficiency": 0.899}, {"comm_share": 0.262}])
def test_right_conclusions_pass(change):
    concluded(change)


class Looks:
    """A room in which runs, run again, are as fast as each look says: the alone's samples/s, then the together's."""

    def __init__(self, *looks):
        self.speeds = [speed for look in looks for speed in look]

    def part(self, run, until):
        speed = self.speeds.pop(0)
        rows = [{"event": "train", "step": step, "loss": 1.0, "samples_per_s": speed} for step in range(1, until + 1)]
        return again.Part(Path(), rows)


# By the folders two ranks are 1.8 times as fast as one; a busy machine may bring a look four times away from that.
@pytest.mark.parametrize("looks", [[(100, 180)], [(100, 50)], [(100, 700)], [(100, 20), (100, 180)]])
def test_speeds_of_a_busy_machine_pass(looks):
    room = Looks(*looks)
    report.refuse_other_speeds(room, ONE, DDP)
    assert room.speeds == [], "looked again without a reason"


@pytest.mark.parametrize("looks", [[(100, 40), (100, 44)], [(100, 9), (100, 800)], [(100, 1000), (100, 730)]])
def test_speeds_that_no_look_comes_near_are_refused(looks):
    with pytest.raises(CheckFailed) as caught:
        report.refuse_other_speeds(Looks(*looks), ONE, DDP)
    assert caught.value.mistake == "metrics_edited", str(caught.value)
    for alone, together in looks:
        assert f"{together / alone:.2f}" in str(caught.value)
