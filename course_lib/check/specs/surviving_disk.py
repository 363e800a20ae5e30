"""Exercise 10, in the rank: every moment at which a kill could come while a checkpoint is saved, kept as a copy.

No process is killed. What kill -9 leaves behind is what the files hold at that moment: bytes that Python still had in
a buffer are not there, bytes that were written are. So `Disk` copies the folder before each call that changes it and
in the middle of each write, and a second process loads each copy.

After a power cut less is left: of each file only what an fsync made safe. (Names are taken to be safe at once, which
is kinder than some file systems are: fsync of the folder, too, makes them so.)
"""

import builtins
import errno
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

CHANGING = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "link", "symlink", "truncate", "ftruncate")
WORDS = {"unlink": "remove"}  # as pathlib and shutil call it


Copy = dict[str, tuple[bytes | None, int]]  # name: content (None: a folder) and time of the last change


def keep(folder: Path) -> Copy:
    """All that lies in a folder, folders before what is in them."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else None, path.stat().st_mtime_ns)
        for path in paths
    }


def lay_out(copy: Copy, folder: Path) -> Path:
    """The same files in a new folder."""
    folder.mkdir()
    for name, (content, changed) in copy.items():
        path = folder / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
            os.utime(path, ns=(changed, changed))
    return folder


class Disk:
    """Watches one folder while `watching`. `moments`: (copy, copy after a power cut or None, what happened before)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moments: list[dict[str, Any]] = []
        self.full = False  # the disk takes half of the next write, and then nothing more
        self.synced: dict[int, int] = {}  # inode: bytes that an fsync has made safe
        self._last: dict[str, tuple] = {}
        self._thread, self._busy = threading.get_ident(), False
        self._before: dict[str, tuple] = {}

    def begin(self) -> None:
        """A save begins."""
        self.moments = []
        self._before = self._last = self.look()

    def moment(self, before: str) -> None:
        """A kill could come here, before this call; the folder is copied if it has changed since the last moment."""
        if self._busy or threading.get_ident() != self._thread or (now := self.look()) == self._last:
            return
        self._busy, self._last = True, now
        copy, cut = keep(self.folder), None
        unsafe = {name: safe for name, (inode, size, _) in now.items() if (safe := self.synced.get(inode, 0)) < size}
        if unsafe:
            cut = copy | {name: (copy[name][0][:safe], copy[name][1]) for name, safe in unsafe.items()}
        self._busy = False
        old = {name: entry for name, entry in self._before.items() if now.get(name) != entry}
        self.moments.append({
            "copy": copy, "cut": cut, "before": before,
            "overwritten": [n for n in old if n in now], "removed": [n for n in old if n not in now],
            "unsafe": [*unsafe], "late": [name for name in unsafe if now[name][0] in self.synced],
        })  # fmt: skip

    def look(self) -> dict[str, tuple]:
        """Each file: inode, size, time of its last change. Folders count as well."""
        found = {}
        for path in self.folder.rglob("*"):
            told = path.lstat()
            entry = (told.st_ino, told.st_size, told.st_mtime_ns) if path.is_file() else (0, 0, 0)
            found[str(path.relative_to(self.folder))] = entry
        return found

    def is_ours(self, path: Any) -> bool:
        """Whether a path (or an open file's number) belongs to the folder."""
        if self._busy or threading.get_ident() != self._thread:
            return False
        if isinstance(path, int):
            return stat.S_ISREG(os.fstat(path).st_mode)
        path = os.path.realpath(os.fsdecode(path))
        return path == (folder := os.path.realpath(self.folder)) or path.startswith(folder + os.sep)

    def name(self, path: Any) -> str:
        """As it is called in the folder."""
        return "a file" if isinstance(path, int) else os.path.relpath(os.fsdecode(path), self.folder)

    def fsync(self, descriptor: int) -> None:
        """In the place of os.fsync: nothing is waited for. Of a folder, too, which changes nothing here."""
        self.moment("fsync")
        told = os.fstat(descriptor)
        if stat.S_ISREG(told.st_mode):
            self.synced[told.st_ino] = told.st_size

    def written(self, descriptor: int, at: int) -> None:
        """Bytes were written from this place on: what an fsync made safe before ends there."""
        inode = os.fstat(descriptor).st_ino
        if inode in self.synced:
            self.synced[inode] = min(self.synced[inode], at)

    def forget(self) -> None:
        """Files that are gone: a new one may get their inode."""
        there = {inode for inode, _, _ in self.look().values()}
        self.synced = {inode: size for inode, size in self.synced.items() if inode in there}


class _File(io.FileIO):
    """A file that is written in halves, with a moment between them."""

    disk: Disk
    called: str

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        half = len(view) // 2
        if half and self.disk.is_ours(self.fileno()):
            self.disk.written(self.fileno(), self.tell())
            super().write(view[:half])
            self.disk.moment(f"the rest of {self.called} is written")
            if self.disk.full:
                raise OSError(errno.ENOSPC, "No space left on device", self.called)
            super().write(view[half:])
            self.disk.moment(f"anything comes after {self.called} is written")
            return len(view)
        return super().write(view)


def _opener(disk: Disk, real: Callable) -> Callable:
    def watched(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if not set(mode) & set("wax+") or not disk.is_ours(file):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        disk.moment(f"{disk.name(file)} is opened")
        raw = _File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.disk, raw.called = disk, disk.name(file)
        if "w" in mode:
            disk.written(raw.fileno(), 0)
        disk.moment(f"{raw.called} is written")
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return watched


def _changing(disk: Disk, name: str, real: Callable) -> Callable:
    def watched(path, *args, **kwargs):
        where = disk.name(path) if not kwargs.get("dir_fd") else os.fsdecode(path)
        disk.moment(f"{WORDS.get(name, name)} of {where}")
        try:
            return real(path, *args, **kwargs)
        finally:
            disk.forget()

    return watched


def replacements(disk: Disk, unsafe: list[str]) -> dict[tuple[Any, str], Callable]:
    """(module, name): what stands there while the folder is watched. `unsafe` takes note of pickles that are run."""
    import pickle

    save, load = torch.save, torch.load
    opened = _opener(disk, io.open)

    def save_watched(obj, f, *args, **kwargs):
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with opened(f, "wb") as file:
            return save(obj, file, *args, **kwargs)

    def load_watched(*args, **kwargs):
        if kwargs.get("weights_only") is False:
            unsafe.append("torch.load(..., weights_only=False)")
        return load(*args, **kwargs)

    def noted(name: str, real: Callable) -> Callable:
        def called(*args, **kwargs):
            unsafe.append(name)
            return real(*args, **kwargs)

        return called

    found = {(os, name): _changing(disk, name, getattr(os, name)) for name in CHANGING}
    found |= {(module, "open"): opened for module in (builtins, io)}
    found |= {(os, name): disk.fsync for name in ("fsync", "fdatasync")}
    found |= {(pickle, name): noted(f"pickle.{name}", getattr(pickle, name)) for name in ("load", "loads")}
    return found | {(torch, "save"): save_watched, (torch, "load"): load_watched}


@contextmanager
def watching(disk: Disk, unsafe: list[str], scope: dict[str, Any]) -> Iterator[None]:
    """Replace the functions that touch files; `scope`: the learner's globals, where "from os import replace" has left
    its mark."""
    new = replacements(disk, unsafe)
    old = {place: getattr(*place) for place in new}
    known = {id(function): new[place] for place, function in old.items()}
    named = {name: value for name, value in scope.items() if id(value) in known}
    try:
        for (module, name), function in new.items():
            setattr(module, name, function)
        scope |= {name: known[id(value)] for name, value in named.items()}
        yield
    finally:
        for (module, name), function in old.items():
            setattr(module, name, function)
        scope |= named
