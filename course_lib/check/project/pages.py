"""What a report page says: the names of its runs and the rows of its tables, read out of the HTML."""

from html.parser import HTMLParser
from pathlib import Path

from course_lib.check.project.files import MEGABYTE, content
from course_lib.check.verdict import CheckFailed
from course_lib.show.report import report
from course_lib.show.report_page import MAKER
from course_lib.show.report_read import NoRun, read_run

LARGEST = 32 * MEGABYTE
Table = list[list[str]]


class _Reader(HTMLParser):
    """Collects the text of each h1 and of each cell, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[str] = []
        self.rows: Table = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """A new place for text."""
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag == "h1":
            self.heads.append("")
        self.inside = tag if tag in ("td", "th", "h1") else self.inside

    def handle_endtag(self, tag: str) -> None:
        """Text that follows belongs nowhere."""
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data: str) -> None:
        """Text."""
        if self.inside == "h1":
            self.heads[-1] += data
        elif self.inside and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def refuse_other_page(project: Path, runs: list[str]) -> None:
    """Raise CheckFailed when report.html is not what `course report` makes of these run folders now."""
    command = f"course report {' '.join(runs)} --out report.html"
    if not (project / "report.html").exists():
        raise CheckFailed(f"There is no report.html: {command}", "no_report")
    text = content(project / "report.html", "the project", LARGEST).decode(errors="replace")
    if MAKER not in text[:400]:
        raise CheckFailed(f"report.html was not made by `course report`. Make it: {command}", "no_report")
    heads, rows = read_page(text)
    names = {Path(run).name: run for run in runs}
    if missing := [run for name, run in names.items() if name not in heads]:
        raise CheckFailed(f"report.html is not about {', '.join(missing)}. Make it again: {command}", "runs_missing")
    order = [names[head] for head in heads if head in names]
    try:
        made = report([read_run(project / run) for run in order])
    except NoRun as problem:
        raise CheckFailed(str(problem), "no_report") from None
    _, wanted = read_page(made)
    if rows != wanted:
        told, right = next(
            ((one, other) for one, other in zip(rows, wanted, strict=False) if one != other), (["fewer rows"], ["more"])
        )
        raise CheckFailed(
            f"report.html is not what the run folders say now: it has {' | '.join(told)!r:.150}, and should have "
            f"{' | '.join(right)!r:.150}. Make it again, after the last run: {command}",
            "old_report",
        )


def read_page(text: str) -> tuple[list[str], Table]:
    """(headings, rows of all tables)"""
    reader = _Reader()
    reader.feed(text)
    return reader.heads, reader.rows
