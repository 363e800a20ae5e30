"""Exercises from solutions: nbgrader takes the solutions out, in this process, without its database.

The same as `nbgrader generate_assignment NN_topic --no-db --force` for each exercise, in one start.
"""

import logging
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from traitlets.config import Config, PyFileConfigLoader

from tools.source import BEGIN, SourceError, pin


def release(solutions: dict[str, NotebookNode], config_file: Path, folder: Path) -> dict[str, NotebookNode]:
    """The exercises that belong to `solutions` (name -> notebook), made in `folder`, an empty one.

    Raises SourceError when nbgrader refuses a solution.
    """
    from nbgrader.converters import GenerateAssignment  # costs a second, so only when it is needed
    from nbgrader.converters.base import NbGraderException
    from nbgrader.coursedir import CourseDirectory

    config = PyFileConfigLoader(config_file.name, path=str(config_file.parent)).load_config()
    config.merge(Config({"SaveCells": {"enabled": False}, "GenerateAssignment": {"no_database": True, "force": True}}))
    log = logging.getLogger("nbgrader.release")
    log.setLevel(logging.ERROR)
    exercises = {}
    for name, notebook in solutions.items():
        (folder / "solutions" / name).mkdir(parents=True)
        nbformat.write(notebook, folder / "solutions" / name / f"{name}.ipynb")
        course = CourseDirectory(config=config, root=str(folder), assignment_id=name)
        try:
            GenerateAssignment(coursedir=course, config=config, log=log).start()
        except NbGraderException as problem:
            raise SourceError(f"{notebook.metadata.course.source}: nbgrader refuses it: {problem}") from problem
        made = nbformat.read(folder / "exercises" / name / f"{name}.ipynb", as_version=4)
        if any(BEGIN in cell.source for cell in made.cells):
            raise SourceError(f"{notebook.metadata.course.source}: nbgrader left a part of the solution in.")
        exercises[name] = pin(made, notebook.metadata.course.source)
    return exercises
