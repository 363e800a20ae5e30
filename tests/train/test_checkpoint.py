"""Checkpoints survive what disks, people and kill -9 do to them. No ranks here: rank 0 writes and reads alone."""

import json
import os
import pickle
import resource
import signal
import threading

import pytest
import torch

from course_lib.train import checkpoint
from course_lib.train.checkpoint import newest_valid, save, saved
from course_lib.train.errors import CannotWrite, ConfigError
from course_lib.train.manifest import write_manifest
from course_lib.train.writer import Writer


def state(step: int, numbers: int = 1000) -> dict:
    return {"step": step, "model": {"weight": torch.full((numbers,), float(step))}}


def newest(folder) -> tuple[int | None, list[str]]:
    """The step that a new launch would continue from, and what it would warn of."""
    warnings = []
    content = newest_valid(folder, warnings.append)
    return (None if content is None else checkpoint.decode(content)["step"]), warnings


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil",))


def poison(path):
    """A manifest that fits, and a pickle that would run code."""
    path.write_bytes(pickle.dumps({"step": 6, "evil": Evil()}, protocol=2))
    path.with_name("manifest.json").write_bytes(write_manifest({"state.pt": path.read_bytes()}))


def rename_it(path):
    path.with_name("manifest.json").write_text(json.dumps({"files": {"other.pt": {"bytes": 1, "sha256": "0"}}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "state.pt has {} bytes, and {} were written"),
        (flip_a_bit, "state.pt has other bytes than were written: its sha256 differs"),
        (lambda path: path.unlink(), "state.pt is missing"),
        (lambda path: path.with_name("manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: path.with_name("manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda path: path.with_name("manifest.json").write_text("[]"), "manifest.json cannot be read (TypeError)"),
        (rename_it, "manifest.json does not name state.pt"),
        (poison, "state.pt cannot be read (UnpicklingError)"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, monkeypatch, damage, said):
    monkeypatch.chdir(tmp_path)
    for step in (3, 6):
        save(tmp_path, state(step), keep=2)
    path = tmp_path / "checkpoints" / "step_00000006"
    size = (path / "state.pt").stat().st_size
    damage(path / "state.pt")
    step, warnings = newest(tmp_path)
    assert step == 3
    assert len(warnings) == 1
    assert warnings[0].startswith(f"The checkpoint {path} is damaged and is skipped: {said.format(size - 100, size)}")
    assert not (tmp_path / "evil").exists()


def test_when_all_are_damaged_nothing_begins_again_by_itself(tmp_path):
    for step in (3, 6):
        save(tmp_path, state(step), keep=2)
        truncate(tmp_path / "checkpoints" / f"step_{step:08d}" / "state.pt")
    with pytest.raises(ConfigError, match=r"No checkpoint in .* can be read \(.*step_00000006: .*; .*step_00000003: "):
        newest(tmp_path)
    assert newest(tmp_path / "elsewhere") == (None, [])


@pytest.mark.parametrize("keep", [1, 2])
def test_the_only_valid_one_is_never_deleted(tmp_path, keep):
    """A launch skips damaged 20 and 30 and goes on from 10: what it writes next is older than those."""
    for step in (10, 20, 30):
        save(tmp_path, state(step), keep=3)
    for step in (20, 30):
        flip_a_bit(tmp_path / "checkpoints" / f"step_{step}".replace("_", "_000000") / "state.pt")
    for step in (15, 20, 25, 30, 35):
        save(tmp_path, state(step), keep)
        assert newest(tmp_path)[0] == step
    assert newest(tmp_path) == (35, [])
    assert [checkpoint.step_of(path) for path in saved(tmp_path)] == [30, 35][-keep:]


def test_the_newest_by_number_not_by_name(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, state(step), keep=5)
    assert newest(tmp_path) == (100_000_000, [])


def test_a_full_disk_leaves_the_older_ones(tmp_path):
    """The limit on file size stands for a full disk: the system call fails in the middle of the file."""
    save(tmp_path, state(1), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(CannotWrite, match=r"The checkpoint of step 2 cannot be written to .*: File too large\. "):
            save(tmp_path, state(2, numbers=100_000), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert newest(tmp_path) == (1, [])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CannotWrite, match="The checkpoint of step 3 cannot be written"):
        save(tmp_path / "other", state(3), keep=1)


def test_an_older_one_goes_only_when_the_new_one_can_be_read(tmp_path, monkeypatch):
    save(tmp_path, state(1), keep=1)
    write_file = checkpoint._write_file

    def lying_disk(path, content):
        write_file(path, content if path.suffix == ".json" else bytes(content)[:-1] + b"?")

    monkeypatch.setattr(checkpoint, "_write_file", lying_disk)
    with pytest.raises(CannotWrite, match=r"read back, it is not what was written: state\.pt has other bytes"):
        save(tmp_path, state(2), keep=1)
    assert newest(tmp_path)[0] == 1


CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")


def die_at(folder, number: int) -> int:
    """Save step 3 in a child that kills itself before its `number`-th system call; the child's exit code."""
    child = os.fork()
    if child == 0:
        made = 0

        def deadly(call):
            def counted(*args, **options):
                nonlocal made
                made += 1
                if made == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return counted

        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            save(folder, state(3), keep=1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_kill_9_at_each_system_call_of_a_save(tmp_path):
    """Before the rename the old one is there, after it the new one; what lies around is gone after the next save."""
    seen, number, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        save(folder, state(2), keep=1)
        code = die_at(folder, number)
        step, warnings = newest(folder)
        assert warnings == []
        seen.append(step)
        save(folder, state(4), keep=1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000004"]
    assert code == 0
    assert number > 10
    assert seen == sorted(seen)
    assert set(seen) == {2, 3}


def test_the_state_is_copied_before_it_is_written():
    kept = state(1)
    content = checkpoint.encode(kept)
    kept["model"]["weight"].zero_()
    assert checkpoint.decode(content)["model"]["weight"].tolist() == [1.0] * 1000


def test_the_writer_does_one_thing_at_a_time_and_fails_aloud():
    go, done = threading.Event(), []

    def slow():
        assert go.wait(30)
        done.append("slow")

    writer = Writer(background=True)
    writer.submit(slow)  # returns, though nobody has said go
    assert done == []
    threading.Timer(0.05, go.set).start()
    writer.submit(lambda: done.append("next"))
    assert done[0] == "slow"
    writer.wait()
    assert done == ["slow", "next"]

    def fails():
        raise CannotWrite("no room")

    writer.submit(fails)
    writer.thread.join(30)
    assert writer.failed
    with pytest.raises(CannotWrite, match="no room"):
        writer.submit(slow)
    writer.wait()  # told once
    with pytest.raises(CannotWrite, match="no room"):
        Writer(background=False).submit(fails)
