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

# train(model, optimizer, batch, checkpoints, last, every)


def _shared(checkpoints):
    """What rank 0 finds, on all ranks."""
    box = [checkpoints.load_newest() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _restore(model, optimizer, state):
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _load(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        _restore(model, optimizer, found[1])
    return found[0] if found else 0


def _update(model, optimizer, batch, step, seed=None):
    torch.manual_seed(1000 * step + dist.get_rank() if seed is None else seed)
    _plain_update(model, optimizer, batch, step)


def _plain_update(model, optimizer, batch, step):
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def _state(model, optimizer):
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def _loop(load=_load, update=_update, state=_state, save=None, due=None, begin=lambda start: start + 1):
    """A train function in which one thing is exchanged."""

    def train(model, optimizer, batch, checkpoints, last, every):
        start = load(model, optimizer, checkpoints)
        for step in range(begin(start), last + 1):
            update(model, optimizer, batch, step)
            if due(step, last, every) if due else step % every == 0 or step == last:
                if save:
                    save(checkpoints, step, model, optimizer)
                elif dist.get_rank() == 0:
                    checkpoints.save(step, state(model, optimizer))

    return train


def _stub_train(model, optimizer, batch, checkpoints, last, every):
    raise NotImplementedError


def _destroys_train(model, optimizer, batch, checkpoints, last, every):
    _loop()(model, optimizer, batch, checkpoints, last, every)
    dist.destroy_process_group()


def _save_everywhere(checkpoints, step, model, optimizer):
    checkpoints.save(step, _state(model, optimizer))


def _barrier_inside(checkpoints, step, model, optimizer):
    if dist.get_rank() == 0:
        checkpoints.save(step, _state(model, optimizer))
        dist.barrier()


def _load_each(model, optimizer, checkpoints):
    found = checkpoints.load_newest()
    if found:
        _restore(model, optimizer, found[1])
    return found[0] if found else 0


def _load_each_with_barrier(model, optimizer, checkpoints):
    dist.barrier()
    return _load_each(model, optimizer, checkpoints)


def _load_rank_0(model, optimizer, checkpoints):
    return _load_each(model, optimizer, checkpoints) if dist.get_rank() == 0 else 0


def _load_rank_0_share_step(model, optimizer, checkpoints):
    start = torch.tensor(_load_rank_0(model, optimizer, checkpoints))
    dist.broadcast(start, 0)
    return int(start)


def _broadcast_weights(model, optimizer, checkpoints):
    start = _load_rank_0_share_step(model, optimizer, checkpoints)
    for tensor in model.module.state_dict().values():
        dist.broadcast(tensor, 0)
    return start


def _load_wrapped(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        model.load_state_dict(found[1]["model"])
        optimizer.load_state_dict(found[1]["optimizer"])
    return found[0] if found else 0


def _load_whole(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        model.module.load_state_dict(found[1]["model"].state_dict())
    return found[0] if found else 0


def _load_weights(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        model.module.load_state_dict(found[1]["model"])
    return found[0] if found else 0


def _load_optimizer_only(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        optimizer.load_state_dict(found[1]["optimizer"])
    return found[0] if found else 0


def _load_not_strict(model, optimizer, checkpoints):
    """A file with "module." in it, which strict=False passes over in silence."""
    found = _shared(checkpoints)
    if found:
        names = {f"_orig_mod.{name}": value for name, value in found[1]["model"].items()}
        model.module.load_state_dict(names, strict=False)
        optimizer.load_state_dict(found[1]["optimizer"])
    return found[0] if found else 0


def _load_rng(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        _restore(model, optimizer, found[1])
        rng = found[1]["rng"]
        torch.set_rng_state(rng[dist.get_rank()] if isinstance(rng, list) else rng)
    return found[0] if found else 0


def _with_rng(model, optimizer):
    return {**_state(model, optimizer), "rng": torch.get_rng_state()}


def _save_all_rng(checkpoints, step, model, optimizer):
    states = [torch.zeros_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
    dist.all_gather(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        checkpoints.save(step, {**_state(model, optimizer), "rng": states})


def _seeded_once(model, optimizer, checkpoints):
    torch.manual_seed(dist.get_rank())
    return _load(model, optimizer, checkpoints)


def _on_module(model, optimizer, batch, step):
    torch.manual_seed(1000 * step + dist.get_rank())
    _plain_update(model.module, optimizer, batch, step)


def _parameters_only(model, optimizer):
    return {"model": dict(model.module.named_parameters()), "optimizer": optimizer.state_dict()}


def _load_parameters(model, optimizer, checkpoints):
    found = _shared(checkpoints)
    if found:
        model.module.load_state_dict(found[1]["model"], strict=False)
        optimizer.load_state_dict(found[1]["optimizer"])
    return found[0] if found else 0


def _saves_before(model, optimizer, batch, checkpoints, last, every):
    start = _load(model, optimizer, checkpoints)
    for step in range(start + 1, last + 1):
        torch.manual_seed(1000 * step + dist.get_rank())
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if (step % every == 0 or step == last) and dist.get_rank() == 0:
            checkpoints.save(step, _state(model, optimizer))
        optimizer.step()


def _saves_one_behind(model, optimizer, batch, checkpoints, last, every):
    start = _load(model, optimizer, checkpoints)
    for done in range(start, last):
        _update(model, optimizer, batch, done + 1)
        if ((done + 1) % every == 0 or done + 1 == last) and dist.get_rank() == 0:
            checkpoints.save(done, _state(model, optimizer))


def _at_least_one_step(model, optimizer, batch, checkpoints, last, every):
    step = _load(model, optimizer, checkpoints)
    while True:
        step += 1
        _update(model, optimizer, batch, min(step, last))
        if (step % every == 0 or step == last) and dist.get_rank() == 0:
            checkpoints.save(step, _state(model, optimizer))
        if step >= last:
            return


def _as_the_solution(model, optimizer, batch, checkpoints, last, every):
    _loop()(model, optimizer, batch, checkpoints, last, every)


def _tensor_by_tensor(model, optimizer, checkpoints):
    """Rank 0 sends each tensor of the network; the optimizer's state as an object; the step as a tensor."""
    found = checkpoints.load_newest() if dist.get_rank() == 0 else None
    start = torch.tensor(found[0] if found else 0)
    dist.broadcast(start, 0)
    if start:
        if found:
            model.module.load_state_dict(found[1]["model"])
        for tensor in model.module.state_dict().values():
            dist.broadcast(tensor, 0)
        box = [found and found[1]["optimizer"]]
        dist.broadcast_object_list(box)
        optimizer.load_state_dict(box[0])
    return int(start)


def _whole_objects(model, optimizer):
    return {"model": model.module, "optimizer": optimizer.state_dict()}


def _wrapped(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


WRONG_TRAIN = {
    "stub": _stub_train,
    "destroys_group": _destroys_train,
    "one_rank_in_a_collective": _loop(save=_barrier_inside),
    "all_ranks_save": _loop(save=_save_everywhere),
    "saves_objects": _loop(_load_whole, state=_whole_objects),
    "module_prefix": _loop(_load_wrapped, state=_wrapped),
    "no_save_at_the_end": _loop(due=lambda step, last, every: step % every == 0),
    "counts_from_zero": _saves_one_behind,
    "bypasses_ddp": _loop(update=_on_module),
    "same_mask_each_step": _loop(update=lambda m, o, b, step: _update(m, o, b, step, dist.get_rank())),
    "same_mask_on_all_ranks": _loop(update=lambda m, o, b, step: _update(m, o, b, step, step)),
    "each_rank_looks": _loop(_load_each),
    "only_rank_0_loads": _loop(_load_rank_0),
    "never_loads": _loop(lambda model, optimizer, checkpoints: 0),
    "forgets_step": _loop(begin=lambda start: 1),
    "off_by_one": _loop(begin=lambda start: max(start, 1)),
    "trains_when_done": _at_least_one_step,
    "saves_before_update": _saves_before,
    "optimizer_on_rank_0": _loop(_broadcast_weights),
    "forgets_weights": _loop(_load_optimizer_only),
    "rng_of_rank_0_for_all": _loop(_load_rng, _plain_update, _with_rng),
    "reseeds_at_start": _loop(_seeded_once, _plain_update),
    "forgets_rng": _loop(update=_plain_update),
    "forgets_optimizer": _loop(_load_weights),
    "forgets_buffers": _loop(_load_parameters, state=_parameters_only),
}
AGAIN_TRAIN = [
    ("each_rank_looks", _loop(_load_each_with_barrier)),
    ("only_rank_0_loads", _loop(_load_rank_0_share_step)),
    ("off_by_one", _loop(begin=lambda start: start + 2 if start else 1)),
    ("forgets_weights", _loop(_load_not_strict)),
]
RIGHT_TRAIN = {
    "as the solution": _as_the_solution,
    "the generators of all ranks": _loop(_load_rng, _plain_update, save=_save_all_rng),
    "tensor by tensor": _loop(_tensor_by_tensor),
}
