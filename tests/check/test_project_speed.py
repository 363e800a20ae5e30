"""Exercise 16, speed and report: what is refused by configuration, by losses and by the page, without training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.check import CheckFailed
from course_lib.check.project import report, speed
from course_lib.check.project.disk import refuse_mended_disk
from course_lib.check.project.folder import Run
from course_lib.check.project.pages import read_page, refuse_other_page
from course_lib.check.project.spans import Reading, recorded
from course_lib.show.report import main as course_report
from course_lib.train.cli import parse, words
from course_lib.train.config import as_json

SLOW = {"data.name": "project.py:slow_disk", "model.name": "project.py:network", "data.batch": 6, "data.accumulate": 4}
FAST = {**SLOW, "data.batch": 24, "data.accumulate": 1, "data.workers": 2}
TRACE = [  # one step of one pass
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 50),
    ("DistributedDataParallel.forward", 60, 40),
    ("autograd::engine::evaluate_function: MulBackward0", 110, 10),
    ("Optimizer.step#SGD.step", 130, 6),
]


def run(name: str, options: dict, ranks: int = 2, losses: tuple = (2.0, 1.5, 1.0), project: Path = Path()) -> Run:
    """As the judge has it after reading."""
    config = parse(words("digits", options))
    flat = {f"{part}.{key}": value for part, found in as_json(config).items() for key, value in found.items()}
    rows = [
        {"event": "train", "step": step, "loss": loss, "samples_per_s": 100.0 * ranks, "comm_share": 0.1}
        for step, loss in enumerate(losses, 1)
    ]
    return Run(project, name, config, flat, {"parameters": 100}, ranks, len(losses), 30, rows, {})


def both(slow: Run, fast: Run) -> None:
    speed.refuse_no_thieves(slow)
    speed.refuse_other_work(slow, fast)
    speed.refuse_thieves_left(fast)


@pytest.mark.parametrize(
    ("mistake", "slow", "fast"),
    [
        ("one_rank", (SLOW, 1), (FAST, 1)),
        ("not_slow", (SLOW | {"data.name": "digits"},), (FAST,)),
        ("not_slow", (SLOW | {"data.workers": 2},), (FAST,)),
        ("not_slow", (FAST | {"data.workers": 0},), (FAST,)),
        ("other_ranks", (SLOW,), (FAST, 3)),
        ("other_data", (SLOW,), (FAST | {"data.name": "digits"},)),
        ("global_batch", (SLOW,), (FAST | {"data.global_batch": 480},)),
        ("other_epochs", (SLOW,), (FAST | {"optim.epochs": 1},)),
        ("other_network", (SLOW,), (FAST | {"model.name": "mlp"},)),
        ("other_job", (SLOW,), (FAST | {"amp.dtype": "bf16"},)),
        ("other_job", (SLOW,), (FAST | {"ddp.comm_hook": "fp16"},)),
        ("data_thief_left", (SLOW,), (FAST | {"data.workers": 0},)),
        ("too_many_workers", (SLOW,), (FAST | {"data.workers": 17},)),
        ("small_batch_left", (SLOW,), (SLOW | {"data.workers": 2},)),
    ],
)
def test_runs_that_are_not_slow_and_fast_are_named(mistake, slow, fast):
    slow, fast = run("runs/slow", *slow), run("runs/fast", *fast)
    with pytest.raises(CheckFailed) as caught:
        both(slow, fast)
    assert caught.value.mistake == mistake, str(caught.value)


@pytest.mark.parametrize(
    "more",
    [{}, {"data.workers": 4}, {"ddp.bucket_mb": 5.0}, {"ddp.gradient_as_bucket_view": True}, {"run.log_every": 5}],
)
def test_other_cures_are_right_too(more):
    both(run("runs/slow", SLOW), run("runs/fast", FAST | more))


def test_losses_of_other_data_are_refused():
    slow = run("runs/slow", SLOW)
    speed.refuse_losses(slow, {1: 2.0001, 2: 1.5}, "started again", "edited_losses")
    with pytest.raises(CheckFailed, match=r"a loss of 1\.50000 at step 2; started again, it is 1\.51000") as caught:
        speed.refuse_losses(slow, {1: 2.0, 2: 1.51}, "started again", "edited_losses")
    assert caught.value.mistake == "edited_losses"


def test_a_row_may_stand_for_several_steps():
    whole = run("runs/slow", SLOW, losses=(2.0, 1.5, 1.0, 0.5))
    seldom = replace(whole, metrics=[{**whole.metrics[1], "loss": 1.75}, {**whole.metrics[3], "loss": 0.75}])
    speed.refuse_losses(seldom, whole.losses, "started again", "edited_losses")
    with pytest.raises(CheckFailed, match="at step 4"):
        speed.refuse_losses(seldom, whole.losses | {3: 1.2}, "started again", "edited_losses")


@pytest.mark.parametrize(("times", "refused"), [(1.29, True), (1.31, False), (0.5, True), (8.0, False)])
def test_fast_must_be_faster(times, refused):
    slow, fast = run("runs/slow", SLOW), run("runs/fast", FAST)
    speeds = {"runs/slow": 1000.0, "runs/fast": 1000.0 * times}
    if not refused:
        assert speed.refuse_not_faster(slow, fast, speeds) == pytest.approx(times)
        return
    with pytest.raises(CheckFailed) as caught:
        speed.refuse_not_faster(slow, fast, speeds)
    assert caught.value.mistake == "not_faster"


@pytest.mark.parametrize(("mine", "refused"), [(40, False), (15, False), (90, False), (5, True), (0, True)])
def test_a_trace_that_cannot_be_is_refused(mine, refused):
    """The learner's says 40 %, the judge's says `mine`."""

    def read(data: float) -> Reading:
        return Reading({0: {"compute": 100.0 - data, "exposed": 0.0, "data": data, "idle": 0.0}}, 1, 4.0)

    if not refused:
        speed.refuse_other_trace(read(40), read(mine))
        return
    with pytest.raises(CheckFailed) as caught:
        speed.refuse_other_trace(read(40), read(mine))
    assert caught.value.mistake == "edited_trace"


DISK = """
import time

class Disk:
    def __getitem__(self, index):
        {line}
        return index

def slow_disk():
    return Disk(), Disk(), 10
"""


@pytest.mark.parametrize(
    ("line", "mistake"),
    [("time.sleep(0.002)", None), ("pass", "disk_mended"), ("time.sleep(0.0005)", "disk_mended"),
     ("time.sleep(0.002 * (index < 30))", "disk_mended"), ("raise OSError", "does_not_run_again")],
)  # fmt: skip
def test_a_disk_that_is_as_slow_as_it_was(tmp_path, line, mistake):
    (tmp_path / "project.py").write_text(DISK.format(line=line))
    if mistake is None:
        refuse_mended_disk(tmp_path)
        return
    with pytest.raises(CheckFailed) as caught:
        refuse_mended_disk(tmp_path)
    assert caught.value.mistake == mistake


def test_traces_that_are_missing_damaged_or_of_another_run(tmp_path):
    slow, fast = (run(name, options, project=tmp_path) for name, options in (("runs/slow", SLOW), ("runs/fast", FAST)))
    traces = tmp_path / "runs" / "fast" / "traces"
    traces.mkdir(parents=True)

    def mistake(of: Run) -> str | None:
        with pytest.raises(CheckFailed) as caught:
            recorded(of)
        return caught.value.mistake

    assert mistake(fast) == "no_trace"
    events = [{"ph": "X", "name": name, "ts": start, "dur": length} for name, start, length in TRACE]
    (traces / "rank_0.json").write_text(json.dumps({"traceEvents": events}))
    assert mistake(fast) == "no_trace"  # of rank 1
    (traces / "rank_1.json").write_text("{")
    assert mistake(fast) == "odd_file"
    (traces / "rank_1.json").write_text((traces / "rank_0.json").read_text())
    assert recorded(fast).passes == 1
    (tmp_path / "runs" / "fast").rename(tmp_path / "runs" / "slow")
    assert mistake(slow) == "foreign_trace"


def test_speeds_that_no_machine_has_are_refused():
    one, ddp = run("runs/one", SLOW, 1), run("runs/ddp", SLOW, 2)

    class Room:
        """Runs nothing: one rank is as fast as two, but for the parts that something else `disturbs`, from 1."""

        def __init__(self, *disturbs: int) -> None:
            self.disturbs, self.parts = disturbs, 0

        def part(self, of: Run, until: int):
            self.parts += 1
            speed = 10.0 if self.parts in self.disturbs else 100.0
            rows = [{**row, "step": step, "samples_per_s": speed} for row in of.metrics[:1] for step in range(1, until)]
            return type("Part", (), {"rows": rows})

    report.refuse_other_speeds(quiet := Room(), one, ddp)
    assert quiet.parts == 2
    report.refuse_other_speeds(Room(2), one, ddp)
    edited = replace(ddp, metrics=[{**row, "samples_per_s": 900.0} for row in ddp.metrics])
    with pytest.raises(CheckFailed, match=r"9\.00 times as fast as one; .*1\.00 times as fast") as caught:
        report.refuse_other_speeds(Room(), one, edited)
    assert caught.value.mistake == "metrics_edited"


# report.html


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Two finished runs and their page, made in the project's folder."""
    monkeypatch.chdir(tmp_path)
    for made in (run("runs/one", SLOW, 1), run("runs/ddp", SLOW)):
        folder = tmp_path / made.name
        folder.mkdir(parents=True)
        facts = {
            "config": as_json(made.config),
            "ranks": made.ranks,
            "steps": made.steps,
            "recipe": "project.py:recipe",
        }
        (folder / "config.json").write_text(json.dumps(facts))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.metrics))
        (folder / "status.json").write_text(json.dumps({"status": "finished", "why": "", "step": made.steps}))
    assert course_report(["runs/ddp", "runs/one", "--out", "report.html"]) == 0
    return tmp_path


BOTH = ["runs/one", "runs/ddp"]


def page_mistake(project: Path, runs: list[str] = BOTH) -> str | None:
    with pytest.raises(CheckFailed) as caught:
        refuse_other_page(project, runs)
    assert "course report" in str(caught.value)
    return caught.value.mistake


def test_a_page_of_these_runs_passes_from_anywhere(project, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    refuse_other_page(project, BOTH)


def test_a_page_that_was_written_by_hand_or_is_missing(project):
    page = project / "report.html"
    page.write_text("<h1>one</h1><h1>ddp</h1>")
    assert page_mistake(project) == "no_report"
    page.unlink()
    assert page_mistake(project) == "no_report"


def test_a_page_without_one_of_the_runs(project):
    (project / "runs" / "one").rename(project / "runs" / "other")
    assert page_mistake(project, ["runs/other", "runs/ddp"]) == "runs_missing"


def test_a_page_whose_numbers_were_edited(project):
    page = project / "report.html"
    text = page.read_text()
    cell = '<td class="num">200</td>'  # samples/s of two ranks, in the table of both
    assert text.count(cell) == 1
    page.write_text(text.replace(cell, cell.replace("200", "900")))
    with pytest.raises(CheckFailed, match=r"ddp.*900.*ddp.*200"):
        refuse_other_page(project, BOTH)
    assert page_mistake(project) == "old_report"


def test_a_page_that_is_older_than_the_runs(project):
    rows = project / "runs" / "ddp" / "metrics.jsonl"
    rows.write_text(rows.read_text().replace('"samples_per_s": 200.0', '"samples_per_s": 300.0'))
    assert page_mistake(project) == "old_report"


def test_a_page_is_read_by_headings_and_rows():
    text = "<h1>a &amp; b</h1><table><thead><tr><th>x</th></tr></thead><tr><td>1</td><td>two <b>three</b></td></tr>"
    assert read_page(f"{text}</table><p>no row</p><h1>c</h1>") == (["a & b", "c"], [["x"], ["1", "two three"]])
