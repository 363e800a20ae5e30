"""`make notebooks`: source/*.py -> notebooks/, solutions/, exercises/.

Everything is built in memory first. Only when all sources are sound are the files that changed replaced, each
in one step, and the notebooks whose source is gone removed. A notebook that a person changed is never
overwritten.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.release import release
from tools.source import SourceError, read_source, text_hash, warnings

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("notebooks", "solutions", "exercises")


def build(root: Path) -> dict[str, NotebookNode]:
    """Every notebook of the course at `root`: path below root -> notebook. Writes nothing there.

    Raises SourceError with the faults of all sources.
    """
    lessons, solutions, faults = {}, {}, []
    for kind, made in (("lessons", lessons), ("exercises", solutions)):
        for path in sorted((root / "source" / kind).glob("*.py")):
            try:
                made[path.stem] = read_source(path, root)
            except SourceError as problem:
                faults.append(str(problem))
    if faults:
        raise SourceError("\n".join(faults))
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        exercises = release(solutions, root / "nbgrader_config.py", Path(folder))
    built = {f"notebooks/{name}.ipynb": notebook for name, notebook in lessons.items()}
    built |= {f"solutions/{name}/{name}.ipynb": notebook for name, notebook in solutions.items()}
    return built | {f"exercises/{name}/{name}.ipynb": notebook for name, notebook in exercises.items()}


def as_bytes(notebook: NotebookNode) -> bytes:
    """The file of a notebook."""
    return (nbformat.writes(notebook)).encode()


def edited(path: Path) -> bool:
    """Whether a person changed the text of the notebook at `path`, or wrote it altogether."""
    try:
        notebook = nbformat.read(path, as_version=4)
        return notebook.metadata.course.text != text_hash(notebook)
    except (AttributeError, KeyError, ValueError, nbformat.reader.NotJSONError):
        return True


def vanished(root: Path, built: dict[str, NotebookNode]) -> list[Path]:
    """Notebooks that were made from a source which is no longer there."""
    found = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.ipynb"))]
    candidates = [path for path in found if path.relative_to(root).as_posix() not in built]
    return [path for path in candidates if ".ipynb_checkpoints" not in path.parts and not edited(path)]


def update(root: Path, only: tuple[str, ...] = FOLDERS) -> list[str]:
    """Bring the folders in `only` up to date. Returns what was done and what is worth a note, a line each.

    Raises SourceError, or PermissionError when a notebook was changed by hand; nothing is written then.
    """
    built = build(root)
    changed = {}
    for name, notebook in built.items():
        path, content = root / name, as_bytes(notebook)
        if name.startswith(only) and not (path.exists() and path.read_bytes() == content):
            changed[path] = content
    by_hand = [path.relative_to(root).as_posix() for path in changed if path.exists() and edited(path)]
    if by_hand:
        raise PermissionError(
            f"{', '.join(by_hand)}: changed by hand, so nothing was written. Notebooks are made from "
            "source/; keep your text under another name, or delete the notebook, and start again."
        )
    done = []
    for path, content in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        spare = path.with_name(f".{path.name}.{os.getpid()}")
        spare.write_bytes(content)
        spare.replace(path)
        done.append(f"wrote {path.relative_to(root).as_posix()}")
    for path in vanished(root, built):
        if path.relative_to(root).as_posix().startswith(only):
            path.unlink()
            if path.parent.name == path.stem and not any(path.parent.iterdir()):
                path.parent.rmdir()
            done.append(f"removed {path.relative_to(root).as_posix()}")
    return done + [f"note: {line}" for notebook in built.values() for line in warnings(notebook)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the notebooks from their sources.")
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=FOLDERS, help="which folders (default: all)")
    try:
        done = update(ROOT, tuple(parser.parse_args().only))
    except (SourceError, PermissionError) as problem:
        print(problem, file=sys.stderr)
        return 1
    print("\n".join(done) or "All notebooks are up to date.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
