"""Wrong and right answers to exercise 10. The name of a wrong answer is the verdict that it must get."""
# ruff: noqa: PTH105, PTH123, BLE001 - written as learners write

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
import zlib
from os import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

# class Checkpoints(folder, keep=2): save(step, state), load_newest()


def encoded(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()


def decoded(content):
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise ValueError("damaged")
    return torch.load(io.BytesIO(content[32:]), weights_only=True)


class Right:
    """As the solution; the wrong ones change one thing."""

    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep

    def save(self, step, state):
        content = encoded(state)
        self.write(self.folder / f"step_{step:08d}", content)
        self.remove_old(step)

    def write(self, path, content):
        beside = self.folder / "unfinished"
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)

    def remove_old(self, step):
        older = [path for path in self.found() if self.step(path) < step]
        for path in older[self.keep - 1 :]:
            path.unlink()

    def step(self, path):
        return int(path.name[5:])

    def found(self):
        """Newest first."""
        return sorted(self.folder.glob("step_*"), key=self.step, reverse=True)

    def load_newest(self):
        for path in self.found():
            try:
                return self.step(path), self.read(path)
            except Exception:
                continue
        return None

    def read(self, path):
        return decoded(path.read_bytes())


class Stub:
    def __init__(self, folder, keep=2):
        raise NotImplementedError


class ReturnsNothing(Right):
    def load_newest(self):
        super().load_newest()


class StumblesOverNothing(Right):
    def load_newest(self):
        return self.step(self.found()[0]), self.read(self.found()[0])


class StringOrder(Right):
    def save(self, step, state):
        self.write(self.folder / f"step_{step}", encoded(state))
        self.remove_old(step)

    def found(self):
        return sorted(self.folder.glob("step_*"), reverse=True)


class ByTime(Right):
    def found(self):
        return sorted(self.folder.glob("step_*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


class WeightsOnlyFalse(Right):
    def read(self, path):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            raise ValueError
        return torch.load(io.BytesIO(content[32:]), weights_only=False)


class Pickled(Right):
    def save(self, step, state):
        content = pickle.dumps(state)
        self.write(self.folder / f"step_{step:08d}", hashlib.sha256(content).digest() + content)
        self.remove_old(step)

    def read(self, path):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            raise ValueError
        return pickle.loads(content[32:])


class InPlace:
    """As in many a script: one file, torch.save, torch.load."""

    def __init__(self, folder, keep=2):
        self.path = Path(folder) / "checkpoint.pt"

    def save(self, step, state):
        torch.save({"step": step, "state": state}, self.path)

    def load_newest(self):
        if not self.path.exists():
            return None
        found = torch.load(self.path, weights_only=True)
        return found["step"], found["state"]


class InPlaceWithBackup(Right):
    """The backup is made by a rename, so for a while nothing has the right name."""

    def save(self, step, state):
        path = self.folder / "latest"
        if path.exists():
            content = path.read_bytes()
            (self.folder / "backup").write_bytes(content)
        with open(path, "wb") as file:
            file.write(step.to_bytes(4, "big") + encoded(state))
            file.flush()
            os.fsync(file.fileno())

    def load_newest(self):
        path = self.folder / "latest"
        return (int.from_bytes(path.read_bytes()[:4], "big"), decoded(path.read_bytes()[4:])) if path.exists() else None


class OldFirst(Right):
    def save(self, step, state):
        for path in self.found():
            path.unlink()
        super().save(step, state)


class FolderOldFirst(Right):
    def save(self, step, state):
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        super().save(step, state)


class TakesHalf(Right):
    """Written under its final name, and the newest must be whole."""

    def write(self, path, content):
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def load_newest(self):
        found = self.found()
        return (self.step(found[0]), self.read(found[0])) if found else None


class NoFsync(Right):
    def write(self, path, content):
        (self.folder / "unfinished").write_bytes(content)
        os.replace(self.folder / "unfinished", path)


class NoFsyncTorchSave(Right):
    def save(self, step, state):
        torch.save({"state": state, "check": encoded(state)[:32]}, self.folder / "unfinished")
        (self.folder / "unfinished").rename(self.folder / f"step_{step:08d}")
        self.remove_old(step)

    def read(self, path):
        found = torch.load(path, weights_only=True)
        if encoded(found["state"])[:32] != found["check"]:
            raise ValueError
        return found["state"]


class LateFsync(Right):
    """Renamed, the old one removed, and only then made safe."""

    def save(self, step, state):
        path = self.folder / f"step_{step:08d}"
        (self.folder / "unfinished").write_bytes(encoded(state))
        os.replace(self.folder / "unfinished", path)
        for old in self.found():
            if old != path:
                old.unlink()
        with open(path, "rb") as file:
            os.fsync(file.fileno())


class NoFlush(Right):
    def write(self, path, content):
        with open(self.folder / "unfinished", "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        os.replace(self.folder / "unfinished", path)


class NoChecksum(Right):
    def write(self, path, content):
        super().write(path, content[32:])

    def read(self, path):
        return torch.load(path, weights_only=True)


class KeepsOne(Right):
    """Atomic, but the newest is the only one."""

    def save(self, step, state):
        self.write(self.folder / "newest", step.to_bytes(4, "big") + encoded(state))

    def load_newest(self):
        path = self.folder / "newest"
        if not path.exists():
            return None
        content = path.read_bytes()
        try:
            return int.from_bytes(content[:4], "big"), decoded(content[4:])
        except ValueError:
            return None


class CrashesOnDamage(Right):
    def load_newest(self):
        found = self.found()
        return (self.step(found[0]), self.read(found[0])) if found else None


class CountsDamaged(Right):
    def remove_old(self, step):
        for path in self.found()[self.keep :]:
            path.unlink()


class LeftoverInTheWay(Right):
    def write(self, path, content):
        folder = self.folder / "unfinished"
        folder.mkdir()
        with open(folder / "state", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "state", path)
        folder.rmdir()


class ExclusiveLeftover(Right):
    def write(self, path, content):
        with open(self.folder / "unfinished", "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / "unfinished", path)


class Swallows(Right):
    def write(self, path, content):
        try:
            super().write(path, content)
        except OSError as error:
            print("could not save:", error)


class NeverDeletes(Right):
    def remove_old(self, step):
        pass


class Destroys(Right):
    def load_newest(self):
        if dist.is_initialized():
            dist.destroy_process_group()
        return super().load_newest()


WRONG_CHECKPOINTS = {
    "stub": Stub,
    "destroys_group": Destroys,
    "returns_nothing": ReturnsNothing,
    "stumbles_over_nothing": StumblesOverNothing,
    "string_order": StringOrder,
    "newest_by_mtime": ByTime,
    "pickle_code": WeightsOnlyFalse,
    "writes_in_place": InPlace,
    "deletes_old_first": OldFirst,
    "takes_half_a_file": TakesHalf,
    "no_fsync": NoFsync,
    "fsync_before_flush": NoFlush,
    "no_checksum": NoChecksum,
    "stops_at_a_damaged_one": CrashesOnDamage,
    "keeps_only_one": KeepsOne,
    "deletes_the_valid_one": CountsDamaged,
    "leftover_in_the_way": LeftoverInTheWay,
    "swallows_errors": Swallows,
    "never_deletes": NeverDeletes,
}
AGAIN_CHECKPOINTS = [  # another way to make the same mistake
    ("pickle_code", Pickled),
    ("writes_in_place", InPlaceWithBackup),
    ("deletes_old_first", FolderOldFirst),
    ("no_fsync", NoFsyncTorchSave),
    ("no_fsync", LateFsync),
    ("leftover_in_the_way", ExclusiveLeftover),
]


class Folders(Right):
    """A folder for each step, with a manifest, renamed as a whole."""

    def save(self, step, state):
        beside, path = self.folder / ".unfinished", self.folder / f"step_{step:08d}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        torch.save(state, beside / "state.pt")
        with (beside / "state.pt").open("rb") as file:
            os.fsync(file.fileno())
            check = zlib.crc32(file.read())
        with (beside / "manifest.json").open("w") as file:
            json.dump({"step": step, "crc": check}, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.rmtree(path)
        replace(beside, path)
        newer = [p for p in self.found() if self.step(p) > step]
        for old in newer + [p for p in self.found() if self.step(p) < step][self.keep - 1 :]:
            shutil.rmtree(old)

    def read(self, path):
        if json.loads((path / "manifest.json").read_text())["crc"] != zlib.crc32((path / "state.pt").read_bytes()):
            raise ValueError
        return torch.load(path / "state.pt", weights_only=True)


class NamedTemporary(Right):
    """A temporary file of its own name each time; leftovers are removed at the next save."""

    def write(self, path, content):
        for leftover in self.folder.glob("tmp*"):
            leftover.unlink()
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="tmp", delete=False) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).rename(path)


class UnderItsFinalName(Right):
    """No rename at all: the checksum tells what is half, and older ones go when the new one was read back."""

    def write(self, path, content):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        decoded(path.read_bytes())


RIGHT_CHECKPOINTS = {
    "as the solution": Right,
    "a folder with a manifest": Folders,
    "a named temporary file": NamedTemporary,
    "under its final name": UnderItsFinalName,
}
