"""`course check`: real notebooks, good and bad, as a learner calls it."""

import subprocess
import symtable
import sys
from pathlib import Path

import nbformat
import pytest

from course_lib.check import command
from course_lib.check.catalogue import GRADED
from course_lib.check.notebook import NotANotebook, read, take, unpack

SHIFT = """
import torch
import torch.distributed as dist

def shift(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = tensor.clone()
    if size > 1:
        sending = dist.isend(tensor, (rank + 1) % size)
        dist.irecv(received, (rank - 1) % size).wait()
        sending.wait()
    return received
"""
STUB = "def read_environment(env, gpus):\n    raise NotImplementedError"
SENDS_FIRST = SHIFT.replace("sending = dist.isend", "sending = dist.isend").replace(
    "dist.irecv(received, (rank - 1) % size).wait()\n        sending.wait()",
    "sending.wait()\n        dist.recv(received, (rank - 1) % size)",
)


def notebook(path: Path, *cells: str, graded: tuple[str, ...] = ("check_shift",), shown: str = "") -> Path:
    """A notebook of code cells; then one with the tag "show", if there is one; then the graded cells."""
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    if shown:
        made.cells.append(nbformat.v4.new_code_cell(shown, metadata={"tags": ["show"]}))
    for name in graded:
        marks = {"grade": True, "grade_id": name, "points": 99, "solution": False, "locked": True, "schema_version": 3}
        made.cells.append(nbformat.v4.new_code_cell("raise SystemExit", metadata={"nbgrader": marks}))
    nbformat.write(made, path)
    return path


def called(capsys, *arguments: object) -> tuple[int, str, str]:
    code = command.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


# Notebooks of the course: of one process, of a group, and of one function of each kind. The others are run elsewhere:
# the checks in all solutions in test_notebooks.py, the stubs of all kinds in the file of each exercise beside this one.
SOME = ("01_ranks", "02_messages", "08_data")
FUNCTIONS = [graded.spec() for graded in GRADED.values() if graded.spec().name in SOME]


def some(folder: Path) -> list[Path]:
    return [folder / name / f"{name}.ipynb" for name in SOME]


def test_solutions_pass_with_full_points(root, capsys):
    code, out, _ = called(capsys, *some(root / "solutions"))
    assert code == 0, out
    rows = [line for line in out.splitlines() if "✔ the checks passed" in line]
    assert len(rows) == len(FUNCTIONS) == 4
    total = sum(spec.points for spec in FUNCTIONS)
    assert f"{total} of {total}" in out


def test_exercises_as_released_are_stubs(root, capsys):
    code, out, _ = called(capsys, *some(root / "exercises"))
    assert code == 1
    assert out.count("is still the stub: write it in the cell above.") == len(FUNCTIONS)


def test_every_graded_cell_of_the_course_has_a_check_with_its_points_and_a_stub(root):
    found = {}
    for path in (root / "exercises").glob("*/*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        sources = [cell.source for cell in cells]
        for marks, source in ((cell.metadata.get("nbgrader", {}), cell.source) for cell in cells):
            if marks.get("grade"):
                found[marks["grade_id"]] = marks["points"]
                spec = GRADED[marks["grade_id"]].spec()
                assert f"({spec.function})" in source
                assert path.stem == spec.name
                defined = [
                    text for text in sources if f"def {spec.function}(" in text or f"class {spec.function}" in text
                ]
                assert not spec.function or ["raise NotImplementedError" in text for text in defined] == [True]
    assert found == {name: graded.spec().points for name, graded in GRADED.items()}


def names(cells: list[str], kinds: str) -> set[str]:
    """The global names of these cells that fit one of the kinds, as symtable has them: "assigned referenced"."""
    found, tables = set(), [symtable.symtable(cell, "cell", "exec") for cell in cells]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        fitting = (s for s in table.get_symbols() if any(getattr(s, f"is_{kind}")() for kind in kinds.split()))
        found |= {symbol.get_name() for symbol in fitting if symbol.is_global()}
    return found


# The project writes a file and needs run folders: test_project_whole.py is about it.
@pytest.mark.parametrize("name", sorted({graded.spec().name for graded in GRADED.values()} - {"16_project"}))
def test_no_solution_needs_a_cell_that_only_shows(root, name):
    """The command leaves them out: a name that they alone make is used nowhere else."""
    path = root / "solutions" / name / f"{name}.ipynb"
    others = [text for _, text in read(path).cells]
    cells = nbformat.read(path, as_version=4).cells
    shown = [cell.source for cell in cells if "show" in cell.metadata.get("tags", ())]
    assert others
    only_shown = names(shown, "assigned imported namespace") - names(others, "assigned imported namespace")
    assert only_shown & names(others, "referenced") == set()


def test_a_table_with_right_and_wrong(tmp_path, capsys):
    """Whatever the files are called, whatever points they claim; cells that fail or only show do no harm."""
    good = notebook(tmp_path / "mine.ipynb", "1 / 0", SHIFT, shown="raise RuntimeError('shown')")
    bad = notebook(tmp_path / "other name.ipynb", "x = 1", SENDS_FIRST)
    code, out, err = called(capsys, good, bad)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[1].split() == ["02_messages", "shift", "5", "of", "5", "✔", "the", "checks", "passed"]
    assert lines[2] == "    Note: Cell In[1] raised ZeroDivisionError: division by zero."
    assert lines[3].startswith("02_messages            shift              0 of 5") and "✘ 4 ranks" in lines[3]
    assert "    rank 0: waits in isend to rank 1 (Cell In[2], line 9)" in lines
    assert lines[-1].strip() == "5 of 10"


def test_a_check_that_was_deleted_is_made_all_the_same(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "def cost(*inputs):\n    raise NotImplementedError", graded=("check_cost",))
    code, out, _ = called(capsys, path)
    assert code == 1 and "0 of 6" in out and "0 of 4" in out and "0 of 10" in out
    assert "The function choose is not there." in out


def test_a_function_that_is_missing_says_what_failed(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "import nothing_of_this_name\n" + SHIFT)
    code, out, _ = called(capsys, path)
    assert code == 1
    assert "Cell In[1] raised ModuleNotFoundError: No module named 'nothing_of_this_name'." in out
    assert "The function shift is not there." in out


def test_a_cell_that_never_ends_is_ended_and_named(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", SHIFT, "y = 0\nwhile True:\n    y += 1")
    code, out, _ = called(capsys, path, "--seconds", 1)
    assert code == 1
    assert "A cell was still running after 1 s and was ended (Cell In[2], line " in out


def test_a_cell_that_ends_the_process(tmp_path, capsys):
    path = notebook(tmp_path / "a.ipynb", "import os\nos._exit(3)", SHIFT)
    code, out, _ = called(capsys, path)
    assert code == 1
    assert "A cell ended the whole process: left with exit code 3" in out


def test_modules_beside_the_notebook_are_found(tmp_path, capsys):
    (tmp_path / "beside_the_notebook.py").write_text("import torch.distributed as dist\n\nisend = dist.isend\n")
    text = SHIFT.replace("dist.isend", "isend").replace("import torch\n", "from beside_the_notebook import isend\n", 1)
    code, out, _ = called(capsys, notebook(tmp_path / "a.ipynb", text + "import torch\n"))
    assert code == 0, out


def test_functions_come_with_what_they_use(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "factor = 3\nimport math", "def shift(x):\n    return math.ceil(factor * x)")
    taken = take(read(path), ["shift", "absent"])
    assert list(taken.functions) == ["shift"] and taken.problems == []
    assert unpack(taken.functions["shift"])(1.5) == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file"),
        ("not json", "this is not a Jupyter notebook"),
        ('{"cells": 3}', "this is not a Jupyter notebook"),
        ("[]", "this is not a Jupyter notebook"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, capsys, content, says):
    path = tmp_path / "a.ipynb"
    if content is not None:
        path.write_text(content)
    code, out, err = called(capsys, path)
    assert (code, out) == (2, "")
    assert says in err and len(err.splitlines()) == 1


def test_notebooks_without_graded_cells(tmp_path, capsys, root):
    lesson = root / "notebooks" / "01_ranks.ipynb"
    foreign = notebook(tmp_path / "a.ipynb", "x = 1", graded=("check_of_another_course",))
    code, out, err = called(capsys, lesson, foreign)
    assert (code, out) == (2, "")
    assert "has no graded cell" in err and "none of its graded cells belongs to this course" in err
    with pytest.raises(NotANotebook, match="no such file"):
        read(tmp_path / "b.ipynb")


def test_folders_and_patterns_that_the_shell_left(tmp_path, capsys):
    """`course check exercises/*.ipynb` finds nothing in the shell: each exercise has a folder of its own."""
    (tmp_path / "02").mkdir()
    stub = notebook(tmp_path / "02" / "a.ipynb", STUB, graded=("check_read_environment",))
    (tmp_path / "02" / ".ipynb_checkpoints").mkdir()
    notebook(tmp_path / "02" / ".ipynb_checkpoints" / "a-checkpoint.ipynb", "1 / 0")
    for arguments in ([tmp_path], [tmp_path / "*.ipynb"], [tmp_path, stub]):
        code, out, err = called(capsys, *arguments)
        assert (code, err, out.count("is still the stub")) == (1, "", 1)
    (tmp_path / "empty").mkdir()
    code, out, err = called(capsys, tmp_path / "empty")
    assert (code, out) == (2, "") and err.endswith("empty: there is no notebook in this folder.\n")


def test_a_file_that_is_missing_does_not_stop_the_others(tmp_path, capsys):
    stub = notebook(tmp_path / "a.ipynb", STUB, graded=("check_read_environment",))
    code, out, err = called(capsys, tmp_path / "b.ipynb", stub)
    assert code == 2 and "b.ipynb: there is no such file" in err and "is still the stub" in out


def test_the_command_line(tmp_path):
    command_line = [sys.executable, "-m", "course_lib.cli", "check"]
    done = subprocess.run([*command_line, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "FILE.ipynb" in done.stdout
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "exercises: there is no such file.\n")
