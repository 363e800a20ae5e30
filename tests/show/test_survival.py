"""Two loss curves on each other: what is counted, and a picture that is there. The button is run by lesson 10."""

from pathlib import Path

import pytest

from course_lib import show
from course_lib.train.processes import kill_rank, ranks_of
from course_lib.train.record import TrainRun


def made(losses: list[float], *starts: int) -> TrainRun:
    rows = [{"event": "start", "step": step} for step in (0, *starts)]
    rows += [{"event": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    return TrainRun(Path("run"), metrics=rows)


def test_bits_are_counted_and_restarts_are_named():
    calm = made([4.0, 2.0, 1.0, 0.5])
    same, other = show.survived(calm, made([4.0, 2.0, 1.0, 0.5], 2)), show.survived(calm, made([4.0, 2.0, 1.25], 1, 2))
    assert same.text == "4 of 4 losses have the same bits; the largest difference is 0, went on after step 2"
    assert other.text == "2 of 3 losses have the same bits; the largest difference is 0.25, went on after step 1, 2"
    assert same.png.startswith(b"\x89PNG")
    assert same.png != other.png
    assert show.survived(calm, calm).png != show.survived(calm, calm, labels=["3 ranks", "2 ranks"]).png


def test_runs_without_a_common_step_are_refused():
    with pytest.raises(ValueError, match="steps in common"):
        show.survived(made([1.0]), made([]))


def test_a_run_that_does_not_go_on_has_no_ranks(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "running", "pid": 1}')
    assert ranks_of(tmp_path) == []
    assert kill_rank(tmp_path, 0) is False
