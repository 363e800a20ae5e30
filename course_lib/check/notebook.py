"""Take the functions out of a learner's notebook: its cells run in a process of their own, with a time limit.

Not all cells run. Graded cells are the judge's own business. Cells with the tag "show" only start ranks and draw
pictures; no function needs them, and they would take most of the time. A cell that fails does not stop the next
one: the function may well be there.
"""

import json
import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.check.alone import start
from course_lib.launch import RunError, run
from course_lib.launch.pickling import dumps, text_of

SECONDS = 60.0  # for the cells of one notebook


class NotANotebook(ValueError):
    """The file cannot be checked; says why in one sentence."""


@dataclass
class Notebook:
    """The cells that matter. Cells are numbered as Jupyter numbers them when all run in order: code cells, from 1."""

    path: Path
    graded: list[str]  # grade ids of the graded cells, each once
    cells: list[tuple[int, str]] = field(repr=False)  # (number, text) of the cells to run


@dataclass
class Taken:
    """What the cells left behind."""

    functions: dict[str, bytes]  # name: pickled
    problems: list[str] = field(default_factory=list)  # what went wrong on the way, a sentence each


def read(path: Path) -> Notebook:
    """Raises NotANotebook. Plain JSON: importing nbformat takes longer than all checks of an exercise."""
    if path.is_dir():
        raise NotANotebook(f"{path}: there is no notebook in this folder.")
    if not path.exists():
        raise NotANotebook(f"{path}: there is no such file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = [_cell(cell) for cell in content["cells"] if cell["cell_type"] == "code"]
    except OSError as problem:
        raise NotANotebook(f"{path}: cannot be read: {problem.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotANotebook(f"{path}: this is not a Jupyter notebook (of format 4).") from None
    graded, cells = [], []
    for number, (source, tags, marks) in enumerate(found, 1):
        if marks.get("grade"):
            graded.append(marks.get("grade_id", ""))
        elif "show" not in tags:
            cells.append((number, source))
    if not graded:
        raise NotANotebook(f"{path}: it has no graded cell; exercises are in the folder `exercises`.")
    return Notebook(path, list(dict.fromkeys(graded)), cells)


def _cell(cell: dict) -> tuple[str, list, dict]:
    """Text, tags and nbgrader's marks; the text may be a list of lines."""
    metadata = cell["metadata"]
    return "".join(cell["source"]), list(metadata.get("tags", ())), dict(metadata.get("nbgrader", {}))


def take(notebook: Notebook, names: list[str], seconds: float = SECONDS) -> Taken:
    """Run the cells and bring back the functions with these names, those that are there."""
    folder = str(notebook.path.resolve().parent)
    try:
        told = run(_run_cells, 1, (notebook.cells, names, folder), seconds, quiet=True, start=start()).results[0]
    except RunError as error:
        return Taken({}, [_ended(error, seconds)])
    return Taken(told["functions"], told["problems"])


def _ended(error: RunError, seconds: float) -> str:
    """A cell that never ends, or that ends the process."""
    lines = [line for line in str(error).splitlines() if line]
    where = next((line.partition("(")[2].rstrip(")") for line in lines if line.startswith("rank 0: ")), "")
    if lines[0].startswith(("not finished", "deadlock")):
        return f"A cell was still running after {seconds:g} s and was ended{f' ({where})' if where else ''}."
    return f"A cell ended the whole process: {lines[0].removeprefix('rank 0 ')}."


def _run_cells(cells: list[tuple[int, str]], names: list[str], folder: str) -> dict[str, Any]:
    """In the process of the notebook."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    os.chdir(folder)
    sys.path.insert(0, folder)  # as in Jupyter: modules that lie beside the notebook
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    problems = []
    for number, text in cells:
        shell.compile.get_code_name = lambda *_, number=number: f"Cell In[{number}]"  # what tracebacks will say
        result = shell.run_cell(text)
        if error := result.error_before_exec or result.error_in_exec:
            problems.append(f"Cell In[{number}] raised {type(error).__name__}: {text_of(error)}.")
    functions = {}
    for name in names:
        if name in shell.user_ns:
            try:
                functions[name] = dumps(shell.user_ns[name])
            except Exception as error:  # noqa: BLE001 - pickling runs arbitrary __reduce__ code
                problems.append(f"{name} cannot be sent to another process: {text_of(error)}.")
    return {"functions": functions, "problems": problems}


def unpack(pickled: bytes) -> Any:
    """The function again. It runs the learner's code: right for a learner's own check, not for a whole class."""
    return pickle.loads(pickled)
