"""`course check [FILE.ipynb ...]`: the same checks as in the notebook, as a table with points."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.check.catalogue import GRADED
from course_lib.check.notebook import SECONDS, NotANotebook, Notebook, Taken, read, take, unpack
from course_lib.check.verdict import CheckFailed
from course_lib.launch import prewarm

if TYPE_CHECKING:
    from course_lib.check.group import GroupSpec
    from course_lib.check.spec import FolderSpec, Spec


@dataclass(frozen=True)
class Row:
    """One graded cell."""

    exercise: str
    function: str
    points: int
    out_of: int
    says: str


def main(argv: list[str]) -> int:
    """0: all passed; 1: something is not right yet; 2: a file cannot be checked (the others are)."""
    parser = argparse.ArgumentParser(
        prog="course check",
        description="Check exercises without opening Jupyter. The cells of each notebook run, but for those with the "
        "tag 'show'; then each graded cell's function is judged, as by the check in the notebook.",
    )
    parser.add_argument(
        "files", nargs="*", type=Path, default=[Path("exercises")], metavar="FILE.ipynb",
        help="notebooks, or folders of them (default: exercises)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit for the cells (default: %(default)g)"
    )
    options = parser.parse_args(argv)
    if options.seconds <= 0:
        parser.error(f"--seconds {options.seconds:g}: give a positive number.")
    notebooks, faults = [], []
    for path in _spread(options.files):
        try:
            notebooks.append(_known(read(path)))
        except NotANotebook as problem:
            faults.append(str(problem))
    if faults:
        print("\n".join(faults), file=sys.stderr, flush=True)
    if notebooks:
        got, out_of = _table(notebooks, options.seconds)
    return 2 if faults else int(got != out_of)


def _spread(paths: list[Path]) -> list[Path]:
    """The notebooks in folders, and those of a pattern that the shell found nothing for, such as exercises/*.ipynb:
    each exercise has a folder of its own."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*.ipynb")) if path.is_dir() else []
        if "*" in path.name and not path.exists():
            inside = sorted(path.parent.rglob(path.name))
        found += [p for p in inside if ".ipynb_checkpoints" not in p.parts] or [path]
    return list(dict.fromkeys(found))


def _table(notebooks: list[Notebook], seconds: float) -> tuple[int, int]:
    """Check and print, line by line; the points, and how many there are."""
    prewarm()  # the agent imports torch while we do
    print(f"{'exercise':<22} {'function':<18} points")
    rows = []
    for notebook in notebooks:
        for row in check(notebook, seconds):
            rows.append(row)
            print(_line(row), flush=True)
    got, out_of = sum(row.points for row in rows), sum(row.out_of for row in rows)
    if len(rows) > 1:
        print(f"{'':<41} {got} of {out_of}")
    return got, out_of


def _known(notebook: Notebook) -> Notebook:
    if not set(notebook.graded) & set(GRADED):
        raise NotANotebook(f"{notebook.path}: none of its graded cells belongs to this course.")
    return notebook


def check(notebook: Notebook, seconds: float = SECONDS) -> list[Row]:
    """A row for each function of the exercise, also when the cell that checks it was deleted."""
    modules = {GRADED[name].module for name in notebook.graded if name in GRADED}
    specs = [graded.spec() for graded in GRADED.values() if graded.module in modules]
    folder = str(notebook.path.resolve().parent)
    sys.path.insert(0, folder)  # the ranks take our path: as in Jupyter, modules beside the notebook are found
    try:
        taken = take(notebook, [spec.function for spec in specs if spec.function], seconds)
        return [_judged(spec, taken, Path(folder)) for spec in specs]
    finally:
        sys.path.remove(folder)


def _judged(spec: "Spec | GroupSpec | FolderSpec", taken: Taken, folder: Path) -> Row:
    from course_lib.check.engine import judge, judge_folder  # it imports torch: by now the agent is doing so as well
    from course_lib.check.spec import FolderSpec

    points = 0
    try:
        if spec.function and spec.function not in taken.functions:
            raise CheckFailed(f"The function {spec.function} is not there.")
        fn = unpack(taken.functions[spec.function]) if spec.function else None
        if isinstance(spec, FolderSpec):
            judge_folder(spec, folder, fn)
        else:
            judge(spec, fn)
        points, says = spec.points, "✔ the checks passed"
    except CheckFailed as problem:
        says = f"✘ {problem}"
    notes = [f"Note: {text}" for text in taken.problems]
    return Row(spec.name, getattr(spec, "label", spec.function), points, spec.points, "\n".join([says, *notes]))


def _line(row: Row) -> str:
    head = f"{row.exercise:<22} {row.function:<18} {row.points} of {row.out_of}"
    first, *others = row.says.splitlines()
    return "\n".join([f"{head:<50} {first}", *(f"    {line}" if line else "" for line in others)])
