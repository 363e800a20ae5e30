"""Are Python, torch and torchvision the ones that the course is tested with?"""

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import course_lib
from course_lib.cluster.finding import Finding, note, ok, problem

REQUIREMENTS = Path(course_lib.__file__).parents[1] / "requirements.txt"
_PACKAGES = ("torch", "torchvision")


def python_version(version: str | None = None) -> Finding:
    """Against Requires-Python of this package."""
    version = version or platform.python_version()
    wanted = metadata.metadata("ring-to-ddp")["Requires-Python"]
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return ok("Python", version)
    cure = "install a fitting Python, remove the folder .venv and call make lab again."
    return problem("Python", f"{version}, but the course needs {wanted}.", cure)


def packages(found: dict[str, Any], requirements: Path = REQUIREMENTS) -> list[Finding]:
    """torch and torchvision as they were really imported, against the tested versions."""
    pins = _pins(requirements)
    findings = []
    for name in _PACKAGES:
        version = found[name]
        if version.startswith("error"):
            text = f"cannot be imported ({version[7:]})."
            findings.append(problem(name, text, f"reinstall both in the same step: {_install(pins)}."))
        else:
            findings.append(_compare(name, version, pins))
    return findings + _together(found)


def _compare(name: str, version: str, pins: dict[str, str]) -> Finding:
    if name not in pins:
        return note(name, f"{version}; there is no requirements.txt beside the course to compare it with.")
    have, tested = Version(Version(version).public), Version(pins[name])
    if have == tested:
        return ok(name, version)
    if have > tested:
        return note(name, f"{version} is newer than {tested}, with which the course is tested.")
    text = f"{version} is older than {tested}, with which the course is tested."
    return problem(name, text, f"{_install(pins)}.")


def _together(found: dict[str, Any]) -> list[Finding]:
    """torchvision says itself which torch it was built for."""
    try:
        wishes = [Requirement(wish) for wish in metadata.requires("torchvision") or []]
    except metadata.PackageNotFoundError:
        return []
    torch = Version(found["torch"]).public
    for wish in wishes:
        if wish.name == "torch" and not wish.specifier.contains(torch, prereleases=True):
            text = f"was built for torch{wish.specifier}, but torch is {torch}."
            return [problem("torchvision", text, "install the pair that requirements.txt names.")]
    return []


def _pins(requirements: Path) -> dict[str, str]:
    """`name==version` lines of a requirements file; empty when there is none."""
    if not requirements.is_file():
        return {}
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return dict(m.groups() for m in (re.match(r"([\w-]+)==([\w.]+)", line) for line in lines) if m)


def _install(pins: dict[str, str]) -> str:
    return "pip install " + " ".join(f"{name}=={pins[name]}" for name in _PACKAGES if name in pins)
