"""The course as pages: executed, complete without a network, honest about a lesson that failed."""

import re
import shutil
from pathlib import Path

import pytest

from tools import html

GOOD = """# %% [markdown]
# # Ranks & messages
# Then [the exercise](../exercises/01_ranks/01_ranks.ipynb). ![ring](ring.png)

# %%
print("the answer is", 6 * 7)
open("written.txt", "w").close()

# %%
from IPython.display import display
widget = "application/vnd.jupyter.widget-view+json"
display({widget: {"model_id": "x"}, "text/html": "<i>a still</i>"}, raw=True)
"""
BAD = "# %% [markdown]\n# # Fails\n# $x^2$\n\n# %%\nprint('before')\n1 / 0\n"
EXERCISE = """# %% [markdown]
# # Try it

# %% solution="f"
def f():
    ### BEGIN SOLUTION
    return 42
    ### END SOLUTION
"""
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360f8cf500f00038101"
    "7f1b3a5f0000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, root: Path) -> tuple[Path, list[str]]:
    """(folder of pages, what failed), for a course whose second lesson fails."""
    course = tmp_path_factory.mktemp("a course")
    for name, text in {
        "lessons/01_ranks": GOOD,
        "lessons/02_fails": BAD,
        "exercises/01_ranks": EXERCISE,
    }.items():
        path = course / "source" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (course / "notebooks").mkdir()
    (course / "notebooks/ring.png").write_bytes(PIXEL)
    shutil.copy(root / "nbgrader_config.py", course)
    failed = html.make(course, course / "html")
    assert list(course.rglob("written.txt")) == []  # lessons run in a copy
    return course / "html", failed


def test_a_lesson_is_executed_and_needs_no_other_server(pages):
    text = (pages[0] / "notebooks/01_ranks.html").read_text()
    assert "the answer is 42" in text
    assert "<i>a still</i>" in text
    assert 'href="../exercises/01_ranks/01_ranks.html"' in text and 'href="../index.html"' in text
    assert "data:image/png;base64," in text
    assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?:[^"]*"', text) == []
    assert not re.search(r"import .* from .https?:", text)


def test_an_exercise_is_shown_with_its_hole(pages):
    text = (pages[0] / "exercises/01_ranks/01_ranks.html").read_text()
    assert "your code here" in text and "42" not in re.sub(r"<style.*?</style>", "", text, flags=re.S)


def test_a_lesson_that_fails_is_named_and_keeps_its_page(pages):
    folder, failed = pages
    assert failed == ["notebooks/02_fails.ipynb: ZeroDivisionError: division by zero"]
    text = (folder / "notebooks/02_fails.html").read_text()
    assert "before" in text and "ZeroDivisionError" in text and "mathjax" in text.lower()
    index = (folder / "index.html").read_text()
    assert "Fails</a> (stopped with an error)" in index and "Ranks &amp; messages</a></li>" in index
    assert index.count("<li>") == 3
