"""Exercise 16 from beginning to end: its solution trains in a notebook, then `course check` judges what it left."""

import asyncio
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from statistics import median

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from course_lib.check import CheckFailed
from course_lib.check.catalogue import GRADED
from course_lib.check.command import main as check_command
from course_lib.check.project import again, report, speed
from course_lib.check.project.folder import read
from course_lib.check.project.spans import recorded
from course_lib.show.report import main as course_report

NAME = "16_project"
IN_THE_NOTEBOOK = "check_project_report"  # it has a function and looks at all folders
STAGES = {name: graded.spec() for name, graded in GRADED.items() if graded.module == "project"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def done(root, tmp_path_factory, processes_with) -> Path:
    """The folder of the solution after its cells have run, from top to bottom, but those of six checks.

    `course check` judges by the same functions, so one of them in the notebook is enough.
    """
    folder = tmp_path_factory.mktemp("project") / NAME
    folder.mkdir()
    notebook = nbformat.read(root / "solutions" / NAME / f"{NAME}.ipynb", as_version=4)
    for cell in graded(notebook):
        if cell.metadata.nbgrader.grade_id != IN_THE_NOTEBOOK:
            cell.source = "..."
    kernel, tag = AsyncKernelManager(kernel_name="python3"), uuid.uuid4().hex
    client = NotebookClient(notebook, km=kernel, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.extra_arguments = ["--log-level=ERROR"]  # it warns that a local kernel is not encrypted
    client.execute(env={**os.environ, "OMP_NUM_THREADS": "1", "COURSE_TEST_PROJECT": tag})
    if kernel.has_kernel:
        asyncio.run(kernel.shutdown_kernel(now=False))
    assert processes_with("COURSE_TEST_PROJECT", tag) == []
    nbformat.write(notebook, folder / f"{NAME}.ipynb")  # `course check` does not look at graded cells, but at the runs
    return folder


def graded(notebook) -> list:
    return [cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade")]


def texts(cell) -> str:
    return "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def content(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_stage_has_its_check_and_one_passes_in_the_notebook(done, root):
    solution = nbformat.read(root / "solutions" / NAME / f"{NAME}.ipynb", as_version=4)
    assert {cell.metadata.nbgrader.grade_id for cell in graded(solution)} == STAGES.keys()
    ran = graded(nbformat.read(done / f"{NAME}.ipynb", as_version=4))
    (said,) = [texts(cell) for cell in ran if cell.metadata.nbgrader.grade_id == IN_THE_NOTEBOOK]
    assert "The checks passed: 10 points." in said


def test_course_check_gives_full_points_from_elsewhere(done, tmp_path, capsys, monkeypatch):
    """In a folder that is not the notebook's: what `evidence` and `conclusions` read is beside the notebook."""
    before = content(done)
    monkeypatch.chdir(tmp_path)
    code = check_command([str(done)])
    ran = capsys.readouterr()
    assert code == 0 and "100 of 100" in ran.out, ran.out + ran.err
    assert list(tmp_path.iterdir()) == []
    assert content(done) == before, "the judge changed or left something there"


def test_six_finished_runs_and_a_report_are_left(done):
    runs = {path.name: json.loads((path / "status.json").read_text())["status"] for path in (done / "runs").iterdir()}
    assert runs == dict.fromkeys(("one", "ddp", "slow", "fast", "killed", "hook"), "finished")
    assert (done / "report.html").read_text().startswith("<!doctype html>")


def test_the_exercise_as_released_has_no_points_and_says_what_to_do(root, tmp_path, capsys):
    folder = tmp_path / NAME
    folder.mkdir()
    shutil.copy(root / "exercises" / NAME / f"{NAME}.ipynb", folder)
    assert check_command([str(folder)]) == 1
    said = capsys.readouterr().out
    assert "0 of 100" in said
    assert said.count("is still the stub: write it in the cell above.") == 3
    assert said.count("is not there: train with --run.dir") == 4


# Folders that say what was never trained: each is a copy, spoiled in one place.


def spoiled(done: Path, tmp_path: Path, spoil) -> Path:
    copy = Path(shutil.copytree(done, tmp_path / NAME))
    spoil(copy)
    return copy


def replace_in(file: str, old: str, new: str):
    def spoil(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return spoil


ALWAYS_ONE = replace_in("project.py", "return self.samples[0, index]", "return self.samples[0, 0]")


def trained_on_one_digit(folder: Path) -> None:
    """What the first rows of runs/slow are when the disk gives the same sample again and again."""
    ALWAYS_ONE(folder)
    slow, file = read(folder, "runs/slow"), folder / "runs" / "slow" / "metrics.jsonl"
    with again.room(folder) as room:
        losses = room.part(slow, until=3).losses
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [
        row | ({"loss": losses[row["step"]]} if row["event"] == "train" and row["step"] <= 3 else {}) for row in rows
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("mistake", "spoil"),
    [
        ("edited_losses", ALWAYS_ONE),
        ("edited_data", trained_on_one_digit),
        ("disk_mended", replace_in("project.py", "time.sleep(0.002)", "time.sleep(0)")),
    ],
)
def test_a_disk_that_was_mended_by_hand_is_no_cure(done, tmp_path, mistake, spoil):
    folder = spoiled(done, tmp_path, spoil)
    seen = recorded(read(folder, "runs/slow"))
    with pytest.raises(CheckFailed) as caught:
        speed.stage(folder, {"thief": "data", "share": seen.share("data"), "passes": 4})
    assert caught.value.mistake == mistake, str(caught.value)


def test_speeds_that_were_edited_are_found(done, tmp_path, monkeypatch):
    """A thousand times: further from the truth than a busy machine can bring the judge's own look."""

    def edit(folder: Path) -> None:
        file = folder / "runs" / "ddp" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [row | {k: 1000 * v for k, v in row.items() if k == "samples_per_s"} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    folder = spoiled(done, tmp_path, edit)
    monkeypatch.chdir(folder)
    assert course_report([*report.RUNS, "--out", "report.html"]) == 0
    one, ddp = (median(report.speeds(read(folder, name))) for name in report.RUNS[:2])
    share = median(row["comm_share"] for row in read(folder, "runs/ddp").rows("train"))
    told = {"speedup": ddp / one, "efficiency": ddp / one / 2, "comm_share": share}
    with pytest.raises(CheckFailed) as caught:
        report.stage(folder, told | {"predicted_speedup": 1.0, "off_by": ddp / one})
    assert caught.value.mistake == "metrics_edited", str(caught.value)
