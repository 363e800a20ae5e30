"""Set-up, tried on a small project with the real Makefile and tools, without the network."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

# A build backend in the project itself, so that pip needs nothing from outside. It waits while `wait` exists.
BACKEND = """
import pathlib, time, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    pathlib.Path("building").touch()
    while pathlib.Path("wait").exists():
        time.sleep(0.05)
    name, info = "toy-1.0-py3-none-any.whl", "toy-1.0.dist-info/"
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        wheel.writestr("toy.pth", str(pathlib.Path.cwd()))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: toy\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "toy"
version = "1.0"
"""
# An interpreter whose `-m venv` copies pip: installing it takes longer than all the rest of a set-up here.
QUICK = """#!/bin/sh
[ "$1 $2 $3" = "-m venv --clear" ] || exec '{python}' "$@"
'{python}' -m venv --without-pip --clear "$4" && cp -R '{pip}' "$4"/lib/python3.*/site-packages
"""


class Toy:
    """The small project in its folder."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        shutil.copy(root / "Makefile", folder)
        shutil.copytree(root / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "backend.py").write_text(BACKEND)
        (folder / "pyproject.toml").write_text(PYPROJECT)
        (folder / "requirements.txt").write_text("# nothing\n")
        (folder / "home").mkdir()
        python = Path(sys.base_prefix, "bin")
        self.env = {
            "HOME": str(folder / "home"),
            "PATH": f"{python}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1",
        }
        self.env |= {name: os.environ[name] for name in ("COURSE_TEST_RUN",) if name in os.environ}
        self.python = folder / ".venv/bin/python"

    def start(self, *arguments: str, **more: str) -> subprocess.Popen:
        """`make` with these arguments in a new process group; stdout and stderr together."""
        return subprocess.Popen(
            [shutil.which("make"), *arguments],
            cwd=self.folder,
            env={**self.env, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def make(self, *arguments: str, **more: str) -> tuple[int, str]:
        """(exit status, all output) of `make`."""
        process = self.start(*arguments, **more)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def require(self, name: str) -> None:
        """Put a wheel of a package `name`, which has one file of 1000 bytes, into requirements.txt."""
        info = f"{name}-1.0.dist-info/"
        with zipfile.ZipFile(self.folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "#" * 1000)
            wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(info + "RECORD", f"{name}.py,,1000\n")
        (self.folder / "requirements.txt").write_text(f"./{name}-1.0-py3-none-any.whl\n")

    def copy_pip(self) -> None:
        """From now on the environments of this toy get their pip by QUICK."""
        python = self.folder / f"bin/python3.{sys.version_info[1]}"
        python.parent.mkdir()
        pip = Path(importlib.util.find_spec("pip").origin).parent
        python.write_text(QUICK.format(python=Path(sys.base_prefix, "bin/python3"), pip=pip))
        python.chmod(0o755)
        self.env["PATH"] = f"{python.parent}:/usr/bin:/bin"

    def imports(self, name: str) -> bool:
        return subprocess.run([self.python, "-c", f"import {name}"], cwd="/", capture_output=True).returncode == 0


@pytest.fixture
def toy(tmp_path: Path, root: Path) -> Toy:
    """Below a folder with a space and a letter outside ASCII, with an empty HOME."""
    return Toy(tmp_path / "new cömer" / "toy", root)


@pytest.mark.slow
def test_installs_once_updates_mends_damage_and_says_what_failed(toy: Toy):
    toy.copy_pip()
    code, said = toy.make("ready")
    assert code == 0, said
    assert "Creating .venv" in said and toy.imports("backend")
    assert toy.make("ready") == (0, "")

    toy.require("pinned")
    code, said = toy.make("ready")
    assert code == 0 and "Creating" not in said and toy.imports("pinned")

    # As a pip that was killed leaves it: no stamp, and a package that is there in part.
    (toy.folder / ".venv/.ready").unlink()
    [half] = (toy.folder / ".venv").glob("lib/python3*/site-packages/pinned.py")
    half.write_text("#")
    code, said = toy.make("ready")
    assert code == 0 and "Incomplete packages: pinned" in said and "Starting anew" in said
    assert half.stat().st_size == 1000
    assert toy.make("ready") == (0, "")

    (toy.folder / "requirements.txt").write_text("no-such-package-of-this-course==1.0\n")
    code, said = toy.make("ready")
    assert code != 0 and "The package index has no build of this package for this machine." in said
    assert not (toy.folder / ".venv/.ready").exists() and not (toy.folder / ".venv/tmp").exists()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_an_interrupted_set_up_goes_on_at_the_next_start(toy: Toy, processes_with):
    """Ctrl-C reaches the whole group; the other signals only make, as when a terminal or a machine ends.

    `.venv` is made here as a learner's is, by Python's own venv.
    """
    for how, send in ((signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)):
        (toy.folder / "wait").touch()
        (toy.folder / "building").unlink(missing_ok=True)
        process = toy.start("ready", TOY_SET_UP=str(toy.folder))
        wait_for(toy.folder / "building", process)
        send(process.pid, how)
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert processes_with("TOY_SET_UP", str(toy.folder)) == []
        assert not (toy.folder / ".venv/.ready").exists()

    (toy.folder / "building").unlink()
    process = toy.start("ready")
    wait_for(toy.folder / "building", process)
    os.killpg(process.pid, signal.SIGKILL)  # nobody can tell pip, so it goes on; the next start waits for it
    again = toy.start("ready")
    while "waiting for it" not in again.stdout.readline():
        assert again.poll() is None
    (toy.folder / "wait").unlink()
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0, said
    process.communicate(timeout=60)
    assert toy.imports("backend")
    assert toy.make("ready") == (0, "")


def fake_python(folder: Path, name: str, version: str, venv: int = 1, machine: str = "Linux|x86_64") -> None:
    """An executable that answers the probe as an interpreter of that version would."""
    folder.mkdir(exist_ok=True)
    answer = f"{version.replace('.', '|')}|{venv}|True|{machine}"
    (folder / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(root: Path, monkeypatch: pytest.MonkeyPatch):
    """The modules of the set-up, which import each other as scripts do."""
    monkeypatch.syspath_prepend(root / "tools")
    import packages
    import pythons

    return packages, pythons


def test_the_newest_python_that_fits_is_taken(tools, tmp_path: Path, monkeypatch):
    _, pythons = tools
    fake_python(tmp_path / "bin", "python3", "3.14.0")
    fake_python(tmp_path / "bin", "python3.12", "3.12.4", venv=0)
    fake_python(tmp_path / "bin", "python3.11", "3.11.9")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert pythons.find_python() == (str(tmp_path / "bin/python3.11"), (3, 11, 9))


@pytest.mark.parametrize(
    ("pythons_there", "wanted", "says"),
    [
        ({"python3": {"version": "3.9.2"}}, "", "found: python3 is 3.9.2."),
        ({"python3": {"version": "3.14.1"}}, "", "found: python3 is 3.14.1."),
        ({}, "", "found: none."),
        ({"python3": {"version": "3.12.1"}}, "python3.13", "but PYTHON=python3.13; found: it does not run."),
        ({"python3": {"version": "3.11.2", "venv": 0}}, "", "run `sudo apt install python3.11-venv`."),
        ({"python3": {"version": "3.12.0", "machine": "Darwin|x86_64"}}, "", "PyTorch is no longer built"),
    ],
)
def test_what_is_missing_is_said(tools, tmp_path, monkeypatch, pythons_there, wanted, says):
    _, pythons = tools
    for name, answers in pythons_there.items():
        fake_python(tmp_path / "bin", name, **answers)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(pythons.SetUpError) as caught:
        pythons.find_python(wanted)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_make_says_it_when_there_is_no_python_at_all(toy: Toy, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    code, said = toy.make("lab", PATH=str(tmp_path / "empty"))
    assert code != 0
    assert "Python 3.11, 3.12 or 3.13 is needed, and none was found" in said


def test_too_small_a_disk_is_said_before_anything_is_written(tools):
    packages, pythons = tools
    packages.check_space(free=11e9, present=0, sizes=(6.5e9, 3.5e9))
    packages.check_space(free=4e9, present=6.5e9, sizes=(6.5e9, 3.5e9))  # half done: less is missing
    with pytest.raises(pythons.SetUpError, match=r"needs 10\.0 GB of disk, .* 4\.0 GB are free"):
        packages.check_space(free=4e9, present=0, sizes=(6.5e9, 3.5e9))


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("x\nERROR: OSError: [Errno 28] No space left on device\n", "The disk is full"),
        ("WARNING: Retrying after 'NewConnectionError: Failed to establish'", "cannot be reached"),
        ("ERROR: No matching distribution found for torch==9", "has no build"),
        ("something else", "the reason stands above"),
    ],
)
def test_pip_s_trouble_becomes_a_sentence(tools, log, says):
    packages, _ = tools
    assert says in packages.diagnosis(log)


# One list of versions.


def test_every_requirement_is_pinned_once(root: Path):
    lines = [line for line in (root / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    names = [re.fullmatch(r"([a-z0-9_-]+)==[0-9][\w.+]*", line)[1] for line in lines]
    assert len(names) == len(set(names))


def test_environment_yml_takes_its_versions_from_requirements_txt(root: Path):
    yaml = pytest.importorskip("yaml")
    environment = yaml.safe_load((root / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip, through_pip = environment["dependencies"]
    assert pip == "pip"
    assert through_pip == {"pip": ["-r requirements.txt", "-e ."]}
    minor = int(re.fullmatch(r"python=3\.(\d+)", python)[1])
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14" and 11 <= minor < 14
    assert "dependencies" not in project  # a second list would drift away


def test_make_and_packaging_want_the_same_pythons(tools, root: Path):
    _, pythons = tools
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest, newest = pythons.OLDEST, pythons.NEWEST
    assert wanted == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"


def test_lab_is_private_and_passes_arguments_on(toy: Toy):
    code, said = toy.make("-n", "lab", "LAB_ARGS=--no-browser --ServerApp.port=0")
    assert code == 0
    assert "--ServerApp.ip=127.0.0.1" in said and "--no-browser --ServerApp.port=0" in said
    assert "/lab/tree/notebooks/00_start_here.ipynb" in said and "token" not in said


def test_help_names_every_target(toy: Toy, root: Path):
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.M)) - {"help", "ready"}
    code, said = toy.make()
    assert code == 0 and targets == set(re.findall(r"^make (\w+)", said, re.M))
