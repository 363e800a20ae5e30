"""The house style, for what a machine can judge."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = {
    ".py",
    ".md",
    ".yml",
    ".yaml",
    ".toml",
    ".txt",
    ".sh",
    ".ipynb",
    ".cfg",
    ".svg",
    ".html",
    ".sbatch",
    "",
}
# A folder of somebody's machine, or a package index that only works inside one network.
MACHINE = re.compile(
    r"(?<![\w.~])/(?:home|Users|root|workspace|work)/[\w.-]+|https?://[\w.-]*(?:artifactory|nexus|mirror|proxy)[\w.-]*"
    r"|(?:--?(?:extra-)?index-url|--find-links|--trusted-host)"
)


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[Path]:
    """Files in git, below the repository, that are there now."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout, so which files belong to the course is not known")
    return [Path(name) for name in done.stdout.split("\0") if name and (root / name).is_file()]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_has_nothing_to_say(root: Path, command: list[str]):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n`make lint FIX=1` mends most of it."


def test_no_file_name_has_a_space_or_capital_surprise(tracked: list[Path]):
    assert [str(path) for path in tracked if not re.fullmatch(r"[\w./-]+", str(path), re.ASCII)] == []


def test_no_file_names_somebody_s_machine(root: Path, tracked: list[Path]):
    found = []
    for path in tracked:
        if path.suffix in TEXT and path != Path("tests/test_style.py"):
            for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1):
                found += [f"{path}:{number}: {hit[0]}" for hit in MACHINE.finditer(line)]
    assert found == []


def test_links_between_files_lead_somewhere(root: Path, tracked: list[Path]):
    """In the texts and in the notebooks, whose links start from the folder of the notebook."""
    broken = []
    for path in tracked:
        if path.suffix in {".md", ".ipynb"}:
            text = (root / path).read_text(encoding="utf-8")
            if path.suffix == ".ipynb":
                cells = json.loads(text)["cells"]
                text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
            targets = re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text)
            broken += [f"{path}: {target}" for target in targets if not (root / path.parent / target).exists()]
    assert broken == []


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("see /home/anna/course", True),
        ("cd /Users/anna/x", True),
        ("pip install --index-url https://x", True),
        ("https://mirror.example.org/simple", True),
        ("--data.root /data/imagenet", False),
        ("the notebooks/home folder", False),
        ("https://pypi.org/simple", False),
    ],
)
def test_the_pattern_for_machines_tells_them_apart(line: str, bad: bool):
    assert bool(MACHINE.search(line)) == bad
