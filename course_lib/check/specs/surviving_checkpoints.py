"""Exercise 10, first part: checkpoints that outlive a kill at any moment, a power cut and a damaged disk.

Rank 0 saves and is watched; rank 1, a process that has never saved anything, loads whatever could be left behind.
"""

import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.check import in_rank
from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, GroupCase, Wrong
from course_lib.check.specs.surviving_disk import Disk, watching

ORDER = ("empty", "saved", "kill", "power", "damage", "newest", "back", "again", "full")
KEEP = 2


def make_state(data: torch.Tensor, step: int) -> dict[str, Any]:
    """What a loop would save after a step: tensors of several dtypes, numbers, nested."""
    noise = data[step % len(data)]
    weight, bias = noise[:15].reshape(5, 3).float(), noise[15:20].float()
    return {
        "model": {"0.weight": weight.t(), "0.bias": bias, "1.num_batches_tracked": torch.tensor(step)},
        "optimizer": {
            "state": {0: {"momentum_buffer": weight * 2}, 1: {"momentum_buffer": bias * 2}},
            "param_groups": [{"lr": 0.1, "nesterov": False, "params": [0, 1]}],
        },
        "rng": torch.arange(32, dtype=torch.uint8) + step % 7,
    }


def digest(value: Any) -> str:
    """The same for two states with the same bits, and for no others."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().flatten()
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        text = f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key!r}:{digest(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ",".join(map(digest, value)) + "]"
    else:
        text = f"{type(value).__name__} {value!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(checkpoints: Callable, folder: str | Path, keep: int = KEEP) -> dict[str, Any]:
    """What `load_newest` gives for a folder: {"step", "digest"}, {"step": None} or {"error"}."""
    try:
        found = checkpoints(str(folder), keep).load_newest()
    except Exception as error:  # noqa: BLE001 - whatever the learner's code raises is its answer
        return {"error": type(error).__name__, "text": _text(error, folder)}
    if found is None:
        return {"step": None}
    if not isinstance(found, tuple | list) or len(found) != 2 or type(found[0]) is not int:
        kind = f"a {type(found).__name__}"
        if isinstance(found, tuple | list):
            kind += f" of {', '.join(type(part).__name__ for part in found)}"
        return {"form": kind}
    return {"step": found[0], "digest": digest(found[1])}


def _text(error: Exception, folder: str | Path) -> str:
    """What it says, without the place where the judge keeps its copies."""
    return str(error).replace(str(folder), "folder")[:200] or "without a word"


class Trials:
    """Rank 0: saves, and writes down what is to be loaded and what may come out."""

    def __init__(self, checkpoints: Callable, data: torch.Tensor, base: Path) -> None:
        self.make, self.data, self.base = checkpoints, data, base
        self.list: list[dict[str, Any]] = []
        self.numbers = iter(range(10**6))

    def new(self, kind: str) -> Path:
        folder = self.base / f"{next(self.numbers)}_{kind}"
        folder.mkdir()
        return folder

    def copy(self, folder: Path, kind: str) -> Path:
        target = self.new(kind)
        shutil.copytree(folder, target, dirs_exist_ok=True)
        return target

    def add(self, kind: str, told: str, copy: Path | str, allowed: list[int | None], **more: Any) -> None:
        self.list.append({"kind": kind, "told": told, "copy": str(copy), "allowed": allowed, **more})

    def save(self, store: Any, disk: Disk, step: int, before: int | None) -> None:
        """Save one step; then one trial for each moment, one for each power cut, and one for the end."""
        disk.begin()
        store.save(step, make_state(self.data, step))
        disk.moment("save has returned")
        for moment in disk.moments:
            over = moment["before"] == "save has returned"
            seen = {name: moment[name] for name in ("overwritten", "removed", "unsafe", "late")}
            when = f"after save({step}) has returned" if over else f"in save({step}), before {moment['before']}"
            allowed = [step] if over else [before, step]
            self.add("saved" if over else "kill", f"a kill -9 {when}", moment["copy"], allowed, step=step, **seen)
            if moment["cut"]:
                self.add("power", f"a power cut {when}", moment["cut"], allowed, step=step, **seen)


def saver(checkpoints: Callable, data: torch.Tensor, steps: list[int], base: Path, unsafe: list[str]) -> list[dict]:
    """All that rank 0 does; the trials."""
    trials = Trials(checkpoints, data, base)
    scope = next((f.__globals__ for f in vars(checkpoints).values() if hasattr(f, "__globals__")), {})
    folder, copies = trials.new("main"), trials.new("copies")
    disk, sizes, before = Disk(folder, copies), [], None
    with watching(disk, unsafe, scope):
        store = checkpoints(str(folder), KEEP)
        trials.add("empty", "in an empty folder", trials.copy(folder, "empty"), [None])
        for step in steps:
            there = disk.look()
            trials.save(store, disk, step, before)
            before, sizes = step, [*sizes, sum(size for _, size, _ in disk.look().values())]
    older, newest = steps[-2:]
    _touch(trials, folder, steps)
    fresh = [Path(n) for n, entry in disk.look().items() if entry[0] and there.get(n) != entry]  # came with the newest
    _damage(trials, folder, fresh, older, newest)
    trials.list[0]["sizes"] = sizes
    _again(trials, disk, newest)
    _go_back(trials, folder, fresh, older, unsafe, scope)
    _full(trials, folder, newest, unsafe, scope)
    return trials.list


def _touch(trials: Trials, folder: Path, steps: list[int]) -> None:
    """As after a copy with cp: the times of the files mean nothing. Newest first, so the oldest is the youngest."""
    copy = trials.copy(folder, "newest")
    files = sorted((f for f in copy.rglob("*")), key=lambda f: (folder / f.relative_to(copy)).stat().st_mtime_ns)
    for age, file in enumerate(files):
        os.utime(file, (1e9 - 60 * age, 1e9 - 60 * age))
    trials.add("newest", "after all files were copied, so that the older ones have the newer times", copy, [steps[-1]])


def _damage(trials: Trials, folder: Path, fresh: list[Path], older: int, newest: int) -> None:
    """One file at a time, then all that came with the newest checkpoint."""
    needle = make_state(trials.data, newest)["model"]["0.bias"].numpy().tobytes()
    for file in fresh:
        content = (folder / file).read_bytes()
        at = max(content.find(needle), 0) or len(content) // 2
        flipped = bytearray(content or b"?")
        flipped[min(at + 3, len(flipped) - 1)] ^= 0x40
        ways = {"cut off in the middle": content[: len(content) // 2], "empty": b"", "with one flipped bit": flipped}
        for what, then in ways.items():
            copy = trials.copy(folder, "damage")
            (copy / file).write_bytes(then)
            trials.add("damage", f"with {file} {what}", copy, [older, newest], way=what)
        copy = trials.copy(folder, "damage")
        (copy / file).unlink()
        trials.add("damage", f"without {file}", copy, [older, newest], way="missing")
    copy = _spoil(trials.copy(folder, "damage"), fresh)
    trials.add("damage", f"with all files of step {newest} cut off", copy, [older], way="all")


def _spoil(folder: Path, files: list[Path]) -> Path:
    for file in files:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 3])
    return folder


def _again(trials: Trials, disk: Disk, newest: int) -> None:
    """Whatever a kill in the last save left: the next save must work there. Rank 1 does it."""
    for moment in disk.moments:
        told = f"the next save, in what a kill -9 before {moment['before']} left behind"
        trials.add("again", told, moment["copy"], [newest + 1], save=newest + 1)


def _go_back(trials: Trials, folder: Path, fresh: list[Path], older: int, unsafe: list[str], scope: dict) -> None:
    """The newest is damaged, so the run went back to the older one and saves again, with keep=1."""
    copy = _spoil(trials.copy(folder, "back"), fresh)
    disk = Disk(copy, trials.new("copies"))
    for file in copy.rglob("*"):
        disk.synced[file.stat().st_ino] = file.stat().st_size
    step, begin = older + 1, len(trials.list)
    with watching(disk, unsafe, scope):
        trials.save(trials.make(str(copy), 1), disk, step, older)
    for trial in trials.list[begin:]:
        trial |= {"kind": "back", "keep": 1}
        trial["told"] += ", when the newest was damaged, the run went on from the one before, and keep is 1"


def _full(trials: Trials, folder: Path, newest: int, unsafe: list[str], scope: dict) -> None:
    copy = trials.copy(folder, "full")
    disk, raised = Disk(copy, trials.new("copies")), ""
    with watching(disk, unsafe, scope):
        store, disk.full = trials.make(str(copy), KEEP), True
        try:
            store.save(newest + 1, make_state(trials.data, newest + 1))
        except Exception as error:  # noqa: BLE001 - that is what it should do
            raised = type(error).__name__
    trials.add("full", "a save on a full disk", copy, [newest], raised=raised)


def drive(checkpoints: Callable, data: torch.Tensor, *, steps: list[int]) -> tuple[dict, dict]:
    """Rank 0 saves, rank 1 loads; "trials": each with "got"."""
    box: list[Any] = [None, None]
    unsafe: list[str] = []
    with tempfile.TemporaryDirectory(dir=in_rank.place, prefix="kills-") as base:
        if dist.get_rank() == 0:
            box = [saver(checkpoints, data, steps, Path(base), unsafe), None]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() == 1:
            scope = next((f.__globals__ for f in vars(checkpoints).values() if hasattr(f, "__globals__")), {})
            with watching(Disk(Path(base), Path(base)), unsafe, scope):
                _load_all(checkpoints, data, box[0])
            box[1] = box[0]
        if dist.is_initialized():
            dist.barrier()  # until then rank 0's folder is there
    return {"trials": box[1] or [], "unsafe": unsafe[:1]}, {}


def _load_all(checkpoints: Callable, data: torch.Tensor, trials: list[dict[str, Any]]) -> None:
    for trial in trials:
        if "save" in trial:
            try:
                checkpoints(trial["copy"], KEEP).save(trial["save"], make_state(data, trial["save"]))
            except Exception as error:  # noqa: BLE001 - as in `load`
                trial["got"] = {"error": type(error).__name__, "text": _text(error, trial["copy"]), "in": "save"}
                continue
        trial["got"] = load(checkpoints, trial["copy"], trial.get("keep", KEEP))


def cases(rng: random.Random) -> list[GroupCase]:
    """One: two processes, four saves. As text the steps are in another order: "10" < "9"."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    data = torch.randn(16, 20, generator=generator, dtype=torch.float64)
    steps = [rng.randint(3, 7), 9, 10, 100 + rng.randint(0, 9)]
    return [GroupCase("kills", "two processes", (data, data), (torch.zeros(0),) * 2, {"steps": steps}, drive=drive)]


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else the first trial that is not, the plainest kind first."""
    for look in (destroyed, ended_badly):
        if wrong := look(e):
            return wrong
    for answer in e.answers[0]:
        for call in answer.facts["unsafe"]:
            return Wrong("unsafe", f"{call} was called to load a checkpoint.", 0)
    if trial := first_wrong(e):
        text = wrong_in(e, trial)
        return Wrong(trial["kind"], f"{text[0].upper()}{text[1:]}", 0)
    return grows(e.answers[0][1].facts["trials"])


def first_wrong(e: Evidence) -> dict[str, Any] | None:
    """The plainest of the trials that went wrong."""
    trials = sorted(e.answers[0][1].facts["trials"], key=lambda t: (ORDER.index(t["kind"]), not t.get("overwritten")))
    return next((trial for trial in trials if wrong_in(e, trial)), None)


def wrong_in(e: Evidence, trial: dict[str, Any]) -> str | None:
    """What is not right about what was loaded, in words."""
    got, told, data = trial["got"], trial["told"], e.cases[0].inputs[0]
    if trial["kind"] == "full" and not trial["raised"]:
        return f"{told}: it returned as if all were well."
    allowed = " or ".join("None" if step is None else f"step {step}" for step in trial["allowed"])
    if "error" in got:
        which = got.get("in", "load_newest")
        return f"{told}: {which} raised {got['error']}: {got['text']}"
    if "form" in got:
        return f"{told}: load_newest returned {got['form']}; needed is (step, state), or None."
    if got["step"] not in trial["allowed"]:
        found = "None" if got["step"] is None else f"step {got['step']}"
        return f"{told}: load_newest must give {allowed}, and gave {found}."
    if got["step"] is not None and got["digest"] != digest(make_state(data, got["step"])):
        return f"{told}: load_newest gave step {got['step']} with other values than were saved."
    return None


def grows(trials: list[dict[str, Any]]) -> Wrong | None:
    """Older checkpoints go: the folder is as large after the last save as after the second."""
    sizes = trials[0]["sizes"]
    if sizes[-1] > 1.3 * sizes[1]:
        text = f"After 2 saves with keep=2 there are {sizes[1]} bytes in the folder, after 4 saves {sizes[-1]}."
        return Wrong("keep", text, 0)
    return None
