"""`course report RUN`: one HTML page about a training run, or about several side by side."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from course_lib.show.report_compare import comparison
from course_lib.show.report_numbers import verdict
from course_lib.show.report_page import MAKER, page
from course_lib.show.report_read import NoRun, Seen, read_run
from course_lib.show.report_sections import sections


def main(argv: list[str]) -> int:
    """0: the page is written, whatever became of the run; 2: there is no run, or no place for the page."""
    args = _parse(argv)
    target = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    try:
        runs = [read_run(folder) for folder in args.runs]
        refuse(target)
        write(target, report(runs))
    except NoRun as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or target
        print(
            f"The report cannot be made: {where}: {error.strerror or error}. --out names another file.", file=sys.stderr
        )
        return 2
    print(target)
    for seen in runs:
        print(verdict(seen) if len(runs) == 1 else f"{seen.name}: {verdict(seen)}")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="course report",
        description="One HTML page about a training run: how it ended, its curves, slow ranks, checkpoints, options. "
        "Of several runs also their speed by ranks. The page needs no network and no script.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder (--run.dir)")
    parser.add_argument("--out", type=Path, help="the file to write (RUN/report.html; of several runs ./report.html)")
    return parser.parse_args(argv)


def report(runs: list[Seen]) -> str:
    """The whole page."""
    if len(runs) == 1:
        return page(f"{runs[0].name}: {runs[0].run.status}", sections(runs[0]))
    parts = "\n<hr>\n".join(sections(seen) for seen in runs)
    return page(f"{len(runs)} runs", f"{comparison(runs)}\n<hr>\n{parts}")


def refuse(target: Path) -> None:
    """Raise OSError for a target that is a folder, or a file that no report was: it may be the only one."""
    if target.is_dir():
        raise IsADirectoryError(0, "that is a folder; name a file in it", str(target))
    if target.exists() and MAKER.encode() not in target.read_bytes()[:400]:
        raise FileExistsError(0, "that file is not a report of before, and is left as it is", str(target))


def write(target: Path, text: str) -> None:
    """Replace it as a whole: a reader sees the old page or the new one."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # A folder's or file's name may hold bytes that are no text.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error  # it is not the other name that matters
    finally:
        with suppress(OSError):  # mostly it is not there any more
            temporary.unlink()
