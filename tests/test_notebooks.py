"""Text to notebooks: the builder on a small course, then what is committed here, then every notebook run."""

import asyncio
import copy
import json
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager

from tools import notebooks, source
from tools.execute import execute

ROOT = Path(__file__).resolve().parents[1]
LESSON = "# %% [markdown]\n# # Ranks\n# What a rank is.\n\n# %%\nprint(1)\n\n# %%\nprint(1)\n"
EXERCISE = """# %% [markdown]
# # Ranks

# %% solution="double"
def double(x):
    ### BEGIN SOLUTION
    return x * 2
    ### END SOLUTION

# %% graded="check_double" points=3
assert double(4) == 8

# %% [markdown] locked="remark"
# Well done.
"""


@pytest.fixture
def course(tmp_path: Path, root: Path) -> Path:
    """A course of one lesson and one exercise, sources only, in a folder with an awkward name."""
    folder = tmp_path / "a cöurse"
    for kind, text in (("lessons", LESSON), ("exercises", EXERCISE)):
        (folder / "source" / kind).mkdir(parents=True)
        (folder / "source" / kind / "01_ranks.py").write_text(text)
    shutil.copy(root / "nbgrader_config.py", folder)
    return folder


def files(course: Path) -> dict[str, bytes]:
    return {p.relative_to(course).as_posix(): p.read_bytes() for p in sorted(course.rglob("*")) if p.is_file()}


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text())["cells"]


def test_makes_the_three_kinds_and_twice_the_same_bytes(course: Path):
    assert len(notebooks.update(course)) == 3
    first = files(course)
    assert {name for name in first if name.endswith(".ipynb")} == {
        "notebooks/01_ranks.ipynb",
        "solutions/01_ranks/01_ranks.ipynb",
        "exercises/01_ranks/01_ranks.ipynb",
    }
    for name in first:
        if name.endswith(".ipynb"):
            (course / name).unlink()
    notebooks.update(course)
    assert files(course) == first
    assert notebooks.update(course) == []


def test_cell_ids_follow_the_text_and_are_unique(course: Path):
    notebooks.update(course)
    before = [cell["id"] for cell in cells(course / "notebooks/01_ranks.ipynb")]
    assert len(set(before)) == 3 and before[2] == f"{before[1]}-2"  # two equal cells
    text = LESSON.replace("# %%\nprint(1)", "# %%\nprint(0)\n\n# %%\nprint(1)", 1)
    (course / "source/lessons/01_ranks.py").write_text(text)
    notebooks.update(course)
    after = [cell["id"] for cell in cells(course / "notebooks/01_ranks.ipynb")]
    assert [after[0], *after[2:]] == before


def test_exercise_has_the_stub_and_the_grader_s_marks(course: Path):
    notebooks.update(course)
    _, solution, graded, remark = cells(course / "exercises/01_ranks/01_ranks.ipynb")
    assert "".join(solution["source"]) == ('def double(x):\n    raise NotImplementedError("your code here")')
    marks = solution["metadata"]["nbgrader"]
    assert (marks["grade_id"], marks["solution"], marks["grade"], marks["locked"]) == (
        "double",
        True,
        False,
        False,
    )
    marks = graded["metadata"]["nbgrader"]
    assert (marks["grade_id"], marks["points"], marks["grade"], marks["locked"]) == (
        "check_double",
        3,
        True,
        True,
    )
    marks = remark["metadata"]["nbgrader"]
    assert (marks["grade_id"], marks["locked"], marks["grade"]) == ("remark", True, False)


def test_a_cell_can_be_a_file_beside_the_notebook(course: Path):
    text = course / "source/exercises/01_ranks.py"
    text.write_text(EXERCISE.replace('solution="double"', 'file="mine.py" solution="double"'))
    notebooks.update(course)
    solved, stub = (cells(course / f"{kind}/01_ranks/01_ranks.ipynb")[1] for kind in ("solutions", "exercises"))
    assert "".join(solved["source"]).startswith("%%writefile mine.py\ndef double(x):\n")
    assert "".join(stub["source"]).startswith("%%writefile mine.py\ndef double(x):\n")
    assert "file" not in solved["metadata"] and stub["metadata"]["nbgrader"]["solution"]
    text.write_text(EXERCISE.replace('solution="double"', 'file="../mine.py" solution="double"'))
    with pytest.raises(source.SourceError, match="name of a Python file beside the notebook is needed"):
        notebooks.update(course)


# `python -m nbgrader`, without the grammar that takes 3 s, see conftest.py.
NBGRADER = "import runpy, sys; sys.modules['rfc3987_syntax'] = None; runpy.run_module('nbgrader', run_name='__main__')"


def test_agrees_with_nbgrader_s_own_command(course: Path):
    notebooks.update(course)
    ours = cells(course / "exercises/01_ranks/01_ranks.ipynb")
    command = [sys.executable, "-c", NBGRADER, "generate_assignment", "01_ranks", "--no-db", "--force"]
    subprocess.run(command, cwd=course, check=True, capture_output=True, timeout=120)
    theirs = cells(course / "exercises/01_ranks/01_ranks.ipynb")
    for cell in (*ours, *theirs):
        del cell["id"]
    assert ours == theirs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (EXERCISE.replace("    ### END SOLUTION\n", ""), "do not stand in pairs"),
        (EXERCISE.replace("### BEGIN", "# BEGIN"), "not exactly '### BEGIN SOLUTION'"),
        (EXERCISE.replace(' solution="double"', ""), "not marked solution"),
        (EXERCISE.replace("points=3", ""), "needs both graded and points"),
        (EXERCISE.replace("points=3", "points=0"), "above 0"),
        (EXERCISE.replace("points=3", "point=3"), "'point' after '# %%'"),
        (EXERCISE.replace("check_double", "double"), "uses the grade id 'double' twice"),
        (EXERCISE.replace('"double"', '"no way"'), "has the grade id 'no way'"),
        (EXERCISE.replace("# # Ranks", "# Ranks"), "'# Title'"),
        (EXERCISE + "\n# %%\n", "cell 5 is empty"),
    ],
)
def test_a_faulty_source_is_a_sentence_and_changes_nothing(course: Path, text: str, says: str):
    notebooks.update(course)
    (course / "source/lessons/01_ranks.py").write_text(LESSON + "\n# %%\nprint(2)\n")
    (course / "source/exercises/01_ranks.py").write_text(text)
    before = files(course)
    with pytest.raises(source.SourceError, match=r"source/exercises/01_ranks\.py: ") as caught:
        notebooks.update(course)
    assert says in str(caught.value)
    assert files(course) == before


def test_a_lesson_may_not_have_solutions_nor_an_odd_name(course: Path):
    shutil.copy(course / "source/exercises/01_ranks.py", course / "source/lessons/1-Ranks.py")
    with pytest.raises(source.SourceError) as caught:
        notebooks.update(course)
    assert "only an exercise can have" in str(caught.value) and "NN_topic.py" in str(caught.value)


def test_a_long_cell_in_a_lesson_is_noted(course: Path):
    (course / "source/lessons/01_ranks.py").write_text(LESSON + "\n# %%\n" + "print(3)\n" * 26)
    assert notebooks.update(course)[-1].endswith("has 26 lines of code; in a lesson, 25 are the most.")


def test_what_a_person_wrote_is_never_overwritten_or_removed(course: Path):
    notebooks.update(course)
    exercise = course / "exercises/01_ranks/01_ranks.ipynb"
    mine = nbformat.read(exercise, as_version=4)
    mine.cells[1].source = "def double(x):\n    return x + x"
    nbformat.write(mine, exercise)
    own = course / "notebooks/my_notes.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), own)
    before = files(course)
    with pytest.raises(PermissionError, match="changed by hand"):
        notebooks.update(course)
    assert files(course) == before
    exercise.unlink()
    assert notebooks.update(course) == ["wrote exercises/01_ranks/01_ranks.ipynb"]
    assert own.exists()


def test_a_notebook_that_was_only_run_is_made_anew(course: Path):
    notebooks.update(course)
    lesson = course / "notebooks/01_ranks.ipynb"
    clean = lesson.read_bytes()
    ran = nbformat.read(lesson, as_version=4)
    ran.cells[1].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    nbformat.write(ran, lesson)
    notebooks.update(course)
    assert lesson.read_bytes() == clean


def test_notebooks_of_a_source_that_is_gone_are_removed(course: Path):
    notebooks.update(course)
    (course / "source/exercises/01_ranks.py").unlink()
    assert sorted(notebooks.update(course)) == [
        "removed exercises/01_ranks/01_ranks.ipynb",
        "removed solutions/01_ranks/01_ranks.ipynb",
    ]
    assert not (course / "exercises/01_ranks").exists()
    assert (course / "notebooks/01_ranks.ipynb").exists()


# What is committed here.


@pytest.fixture(scope="module")
def built() -> dict[str, nbformat.NotebookNode]:
    return notebooks.build(ROOT)


def committed(name: str) -> bytes | None:
    done = subprocess.run(["git", "show", f":{name}"], cwd=ROOT, capture_output=True)
    return done.stdout if done.returncode == 0 else None


def test_committed_notebooks_are_made_from_these_sources(built):
    """The file in the folder or the one in git: a learner who wrote in a notebook has not made it stale."""
    stale = [
        name
        for name, notebook in built.items()
        if notebooks.as_bytes(notebook)
        not in ((ROOT / name).read_bytes() if (ROOT / name).exists() else None, committed(name))
    ]
    assert stale == [], "these are stale: run `make notebooks` and commit what it wrote"


def test_no_notebook_is_committed_without_a_source(built):
    done = subprocess.run(["git", "ls-files", "*.ipynb"], cwd=ROOT, capture_output=True, text=True)
    assert [name for name in done.stdout.splitlines() if name not in built] == []


def test_exercises_hold_no_line_of_their_solutions(built):
    for name, exercise in built.items():
        if not name.startswith("exercises/"):
            continue
        released = {cell.metadata.nbgrader.grade_id: cell for cell in exercise.cells if "nbgrader" in cell.metadata}
        for cell in built[name.replace("exercises/", "solutions/")].cells:
            kept, secret = split(cell.source)
            if secret:
                lines = released[cell.metadata.nbgrader.grade_id].source.splitlines()
                assert [line for line in secret if line in lines and line not in kept] == []
                assert source.BEGIN not in "".join(c.source for c in exercise.cells)


def split(text: str) -> tuple[list[str], list[str]]:
    """(lines outside, lines inside) the solution markers."""
    kept, secret, inside = [], [], False
    for line in text.splitlines():
        if line.strip() in (source.BEGIN, source.END):
            inside = line.strip() == source.BEGIN
        else:
            (secret if inside else kept).append(line)
    return kept, secret


# Every lesson and every solution runs, top to bottom.


BROWSER = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
IN_THE_BROWSER = {"00_start_here"} if BROWSER else set()  # tests/journeys/test_browser.py runs it, so not here again
ELSEWHERE = {"16_project"}  # the solution of: tests/check/test_project_whole.py runs it


def runnable() -> list[str]:
    lessons = [f"notebooks/{path.stem}.ipynb" for path in sorted((ROOT / "source/lessons").glob("*.py"))]
    lessons = [name for name in lessons if Path(name).stem not in IN_THE_BROWSER]
    exercises = [path.stem for path in sorted((ROOT / "source/exercises").glob("*.py")) if path.stem not in ELSEWHERE]
    return lessons + [f"solutions/{name}/{name}.ipynb" for name in exercises]


@pytest.fixture(scope="module")
def kernel(processes_with):
    """One for all notebooks that this worker runs: (kernel, the tag that it and what it starts carry)."""
    manager, tag = AsyncKernelManager(kernel_name="python3"), uuid.uuid4().hex
    yield manager, tag
    if manager.has_kernel:
        asyncio.run(manager.shutdown_kernel(now=False))
    assert processes_with("COURSE_TEST_NOTEBOOK", tag) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", runnable())
def test_runs_without_an_error_and_leaves_no_process(built, name: str, kernel, processes_with):
    manager, tag = kernel
    environment = {"COURSE_TEST_NOTEBOOK": tag, "OMP_NUM_THREADS": "1"}
    execute(copy.deepcopy(built[name]), (ROOT / name).parent, kernel=manager, **environment)
    there = processes_with("COURSE_TEST_NOTEBOOK", tag, 2, most=2)  # the kernel and its idle agent stay
    left = [line for line in there if "ipykernel_launcher" not in line]
    assert len(left) <= 1 and all("course_lib.launch.agent" in line for line in left), left
