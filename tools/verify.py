"""Exit 1 when an installed package lacks a file, or has one of another size. Run by `.venv`'s own Python."""

import sys
from importlib.metadata import distributions


def damaged() -> list[str]:
    """Names of packages whose list of files is missing, or does not agree with the files."""
    bad = []
    for package in distributions():
        files = package.files
        if files is None or not all(
            file.size is None or (file.locate().exists() and file.locate().stat().st_size == file.size)
            for file in files
        ):
            bad.append(package.metadata["Name"] or str(package))
    return bad


if __name__ == "__main__":
    found = damaged()
    if found:
        print("Incomplete packages:", ", ".join(found))
    sys.exit(bool(found))
