"""`make html`: the executed course as pages in html/, for people who only want to read.

Lessons are run, exercises are shown as learners get them. Pages need no network; only where a lesson has
formulas, its page asks a public server for MathJax, and shows the formula as text without it.
"""

import argparse
import copy
import html
import re
import shutil
import sys
import time
from pathlib import Path

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from tools.execute import execute
from tools.notebooks import ROOT, build
from tools.source import SourceError

# nbconvert's page without the scripts that it loads from other servers, and with a way back.
TEMPLATE = """{%- extends 'index.html.j2' -%}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_js_mathjax %}{% if resources.formulas %}{{ super() }}{% endif %}{% endblock %}
{% block body_header %}{{ super() }}
<p style="padding: 0 1em; font-family: sans-serif"><a href="{{ resources.up }}index.html">Ring to DDP</a></p>
{% endblock %}"""
INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Ring to DDP</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ font: 16px/1.6 sans-serif; max-width: 42em; margin: 2em auto; padding: 0 1em }}</style></head>
<body><h1>Ring to DDP</h1>
<p>A course on multi-GPU training, from a ring all-reduce written by hand to a production loop. These pages
were made by running every lesson; <code>make lab</code> opens the same lessons to work in.</p>
{sections}</body></html>
"""


def title(notebook: NotebookNode) -> str:
    """The first line of the first cell."""
    return notebook.cells[0].source.splitlines()[0].removeprefix("# ")


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def page(name: str, notebook: NotebookNode, root: Path) -> str:
    """The page of one notebook; `name` is its path below the repository."""
    exporter = HTMLExporter(raw_template=TEMPLATE, embed_images=True)
    # A widget is live only with a kernel; its still picture is what a page can show.
    kinds = exporter.default_config.NbConvertBase.display_data_priority
    exporter.config.NbConvertBase.display_data_priority = [kind for kind in kinds if "widget" not in kind]
    resources = {
        "metadata": {"name": title(notebook), "path": str((root / name).parent)},
        "formulas": any("$" in cell.source for cell in notebook.cells if cell.cell_type == "markdown"),
        "up": "../" * name.count("/"),
    }
    body, _ = exporter.from_notebook_node(notebook, resources)
    return re.sub(r'(href="(?!\w+:)[^"]*)\.ipynb', r"\1.html", body)


def index(notebooks: dict[str, NotebookNode], failed: set[str]) -> str:
    """The map of the course: the lessons and the exercises, by title."""
    sections = ""
    for folder, heading in (("notebooks/", "Lessons"), ("exercises/", "Exercises")):
        lines = []
        for name, notebook in notebooks.items():
            if name.startswith(folder):
                text = html.escape(title(notebook))
                remark = " (stopped with an error)" if name in failed else ""
                lines.append(f'<li><a href="{name.removesuffix(".ipynb")}.html">{text}</a>{remark}</li>')
        sections += f"<h2>{heading}</h2><ul>{''.join(lines)}</ul>\n" if lines else ""
    return INDEX.format(sections=sections)


def make(root: Path, target: Path) -> list[str]:
    """Write the pages into `target`, in place of what was there. Returns a line for each lesson that failed.

    A lesson that stops with an error still gets its page, with the error on it. Raises SourceError.
    """
    notebooks = {n: copy.deepcopy(b) for n, b in build(root).items() if not n.startswith("solutions/")}
    lessons = [name for name in notebooks if name.startswith("notebooks/")]
    faults: dict[str, str] = {}
    for number, name in enumerate(lessons, 1):
        start = time.monotonic()
        print(f"{number} of {len(lessons)}: {name} ...", end=" ", flush=True)
        try:
            execute(notebooks[name], (root / name).parent)
        except CellExecutionError as problem:
            faults[name] = f"{name}: {problem.ename}: {first_line(problem.evalue)}"
        except (CellTimeoutError, DeadKernelError) as problem:
            faults[name] = f"{name}: {first_line(str(problem))}"
        print(f"{'FAILED' if name in faults else 'ok'}, {time.monotonic() - start:.0f} s", flush=True)
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, notebook in notebooks.items():
        path = (fresh / name).with_suffix(".html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(name, notebook, root), encoding="utf-8")
    (fresh / "index.html").write_text(index(notebooks, set(faults)), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return list(faults.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every lesson and write the course as pages.")
    parser.add_argument("--to", type=Path, default=ROOT / "html", help="folder to write (default: html)")
    target = parser.parse_args().to
    try:
        faults = make(ROOT, target)
    except SourceError as problem:
        faults = [str(problem)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if (target / "index.html").exists():
        print(f"Open {target / 'index.html'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
