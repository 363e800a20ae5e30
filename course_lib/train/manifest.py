"""manifest.json: what the files of a checkpoint must be, so that a damaged one is known before it is used."""

import hashlib
import json
from pathlib import Path


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says in what."""


def write_manifest(files: dict[str, memoryview | bytes]) -> bytes:
    """The content of manifest.json for these files (name: content)."""
    entries = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    return json.dumps({"files": entries}, indent=1).encode() + b"\n"


def read(folder: Path) -> dict[str, bytes]:
    """All files that the manifest names, as bytes. Raises Damaged when one is not as it was written."""
    try:
        entries = json.loads((folder / "manifest.json").read_bytes())["files"]
        wanted = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        raise Damaged("manifest.json is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Damaged(f"manifest.json cannot be read ({type(error).__name__})") from error
    if "state.pt" not in wanted:
        raise Damaged("manifest.json does not name state.pt")
    return {name: _read_file(folder / name, size, digest) for name, (size, digest) in wanted.items()}


def _read_file(path: Path, size: int, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror or error})") from error
    if len(content) != size:
        raise Damaged(f"{path.name} has {len(content)} bytes, and {size} were written")
    if hashlib.sha256(content).hexdigest() != digest:
        raise Damaged(f"{path.name} has other bytes than were written: its sha256 differs")
    return content
