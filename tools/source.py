"""Turn a text source (py:percent) into a notebook with the same bytes every time.

A source is a Python file whose cells begin with `# %%` or `# %% [markdown]`. In an exercise a cell may say
what it is on that line, with its grade id; these words become nbgrader's metadata:

    # %% solution="ring_all_reduce"               the learner writes here; the text between the markers goes
    # %% graded="check_ring_all_reduce" points=4  read-only, and gives points
    # %% locked="set_up"                          read-only

Any cell may say file="project.py": then it writes its text to that file, by %%writefile, instead of running it.
"""

import hashlib
import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
NAME = re.compile(r"\d\d_[a-z0-9]+(_[a-z0-9]+)*")
LONGEST_CELL = 25  # lines of code in a lesson's cell; longer ones do not fit beside their explanation
KINDS = ("solution", "graded", "locked")
ALLOWED = {*KINDS, "points", "file", "tags", "lines_to_next_cell"}  # the last is jupytext's own
PINNED = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}


class SourceError(ValueError):
    """A source cannot become a notebook; says which file, which cell and why, one sentence a line."""


def read_source(path: Path, root: Path) -> NotebookNode:
    """The notebook of one source file below `root`. Raises SourceError with every fault that was found."""
    where = path.relative_to(root).as_posix()
    exercise = path.parent.name == "exercises"
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    faults = _file_faults(path, notebook)
    grade_ids: list[str] = []
    for number, cell in enumerate(notebook.cells, 1):
        found = _cell_faults(cell, exercise)
        grade_ids += [cell.metadata[kind] for kind in KINDS if kind in cell.metadata]
        faults += [f"cell {number} {fault}" for fault in found]
    faults += [f"uses the grade id {name!r} twice" for name in sorted(set(grade_ids)) if grade_ids.count(name) > 1]
    if faults:
        raise SourceError("\n".join(f"{where}: {fault}." for fault in faults))
    for cell in notebook.cells:
        if "file" in cell.metadata:
            cell.source = f"%%writefile {cell.metadata.file}\n{cell.source}"
        cell.metadata = _metadata(cell)
    return pin(notebook, where)


def pin(notebook: NotebookNode, source: str) -> NotebookNode:
    """Give a notebook its fixed metadata and cell ids, and drop all output.

    The id of a cell is a hash of its content, with a counter where two cells are equal. `course` in the
    metadata names the source and holds a hash of the whole text, which tells a person's changes.
    """
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        name = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[name] = seen.get(name, 0) + 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = nbformat.from_dict({**PINNED, "course": {"source": source, "text": text_hash(notebook)}})
    nbformat.validate(notebook)
    return notebook


def text_hash(notebook: NotebookNode) -> str:
    """A hash of what a person can write in a notebook: the kind and text of each cell, not its output."""
    text = "\0".join(f"{cell.cell_type}\n{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def warnings(notebook: NotebookNode) -> list[str]:
    """What is not wrong but should be shorter."""
    where = notebook.metadata.course.source
    lengths = [
        (number, len(cell.source.splitlines()))
        for number, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == "code"
    ]
    return [
        f"{where}: cell {number} has {lines} lines of code; in a lesson, {LONGEST_CELL} are the most."
        for number, lines in lengths
        if lines > LONGEST_CELL and "lessons/" in where
    ]


def _file_faults(path: Path, notebook: NotebookNode) -> list[str]:
    faults = []
    if not NAME.fullmatch(path.stem):
        faults.append("must be named NN_topic.py: two digits, then small letters, digits and underscores")
    cells = notebook.cells
    if not cells or cells[0].cell_type != "markdown" or not re.match(r"# \S", cells[0].source):
        faults.append("must begin with a markdown cell whose first line is the title, '# Title'")
    return faults


def _cell_faults(cell: NotebookNode, exercise: bool) -> list[str]:
    options, faults = cell.metadata, []
    kinds = [kind for kind in KINDS if kind in options]
    unknown = sorted(set(options) - ALLOWED)
    if unknown:
        faults.append(f"has {', '.join(unknown)!r} after '# %%'; known: solution, graded, points, locked, file, tags")
    if not cell.source.strip():
        faults.append("is empty")
    if kinds and not exercise:
        faults.append(f"is marked {kinds[0]!r}, which only an exercise can have")
    if len(kinds) > 1:
        faults.append(f"is marked {' and '.join(kinds)}; one of them is enough")
    faults += [
        f"has the grade id {options[kind]!r}; use letters, digits and underscores"
        for kind in kinds
        if not re.fullmatch(r"[A-Za-z]\w*", str(options[kind]))
    ]
    if "file" in options and not re.fullmatch(r"[a-z_]+\.py", str(options["file"])):
        faults.append(f"has file={options['file']!r}; the name of a Python file beside the notebook is needed")
    points = options.get("points")
    if ("graded" in options) != (points is not None):
        faults.append("needs both graded and points, or neither")
    elif points is not None and not (isinstance(points, int) and points > 0):
        faults.append(f"has points={points!r}; points are a whole number above 0")
    return faults + _marker_faults(cell, "solution" in options)


def _marker_faults(cell: NotebookNode, wanted: bool) -> list[str]:
    marks = [line.strip() for line in cell.source.splitlines() if re.search(r"(BEGIN|END) SOLUTION", line)]
    if any(mark not in (BEGIN, END) for mark in marks):
        return [f"has a marker that is not exactly {BEGIN!r} or {END!r}"]
    if marks != [BEGIN, END] * (len(marks) // 2):
        return [f"has {BEGIN!r} and {END!r} that do not stand in pairs"]
    if marks and not wanted:
        return ['has solution markers but is not marked solution="name"']
    return [f"is marked solution but has no {BEGIN!r}"] if wanted and not marks else []


def _metadata(cell: NotebookNode) -> NotebookNode:
    """The metadata that goes into the notebook: tags, and nbgrader's when the cell is one of its kinds."""
    kept = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
    for kind in KINDS:
        if kind in cell.metadata:
            kept["nbgrader"] = {
                "grade": kind == "graded",
                "grade_id": cell.metadata[kind],
                "locked": kind != "solution",
                "schema_version": 3,
                "solution": kind == "solution",
                "task": False,
            }
    if "graded" in cell.metadata:
        kept["nbgrader"]["points"] = cell.metadata.points
    return nbformat.from_dict(kept)
