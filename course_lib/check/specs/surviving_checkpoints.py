"""Exercise 10, first part: checkpoints that outlive a kill at any moment, a power cut and a damaged disk.

Rank 0 saves and is watched; rank 1, a process that has never saved anything, loads whatever could be left behind.
"""

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.check import in_rank
from course_lib.check.findings import destroyed, ended_badly
from course_lib.check.group import Evidence, GroupCase, Wrong
from course_lib.check.specs.surviving_disk import Copy, Disk, keep, lay_out, watching

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

    def __init__(self, checkpoints: Callable, data: torch.Tensor, base: Path, unsafe: list[str]) -> None:
        self.make, self.data, self.base, self.unsafe = checkpoints, data, base, unsafe
        self.list: list[dict[str, Any]] = []

    @contextmanager
    def disk(self, name: str, copy: Copy) -> Iterator[Disk]:
        """A folder with these files, all of them safe, and watched."""
        disk = Disk(lay_out(copy, self.base / name))
        disk.synced = {inode: size for inode, size, _ in disk.look().values()}
        with watching(disk, self.unsafe, scope_of(self.make)):
            yield disk

    def add(self, kind: str, told: str, copy: Copy, allowed: list[int | None], **more: Any) -> None:
        self.list.append({"kind": kind, "told": told, "copy": copy, "allowed": allowed, **more})

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


def scope_of(checkpoints: Callable) -> dict[str, Any]:
    """The globals of the learner's methods."""
    return next((f.__globals__ for f in vars(checkpoints).values() if hasattr(f, "__globals__")), {})


def saver(trials: Trials, steps: list[int]) -> None:
    """All that rank 0 does."""
    sizes, before = [], None
    with trials.disk("main", {}) as disk:
        store = trials.make(str(disk.folder), KEEP)
        trials.add("empty", "in an empty folder", keep(disk.folder), [None], sizes=sizes)
        for step in steps:
            there = disk.look()
            trials.save(store, disk, step, before)
            before = step
            sizes.append(sum(size for _, size, _ in disk.look().values()))
    left, now = keep(disk.folder), disk.look()
    fresh = [name for name, entry in now.items() if entry[0] and there.get(name) != entry]  # came with the newest
    _touch(trials, left, steps[-1])
    _damage(trials, left, fresh, *steps[-2:])
    _again(trials, disk, steps[-1])
    _go_back(trials, left, fresh, steps[-2])
    _full(trials, left, steps[-1])


def _touch(trials: Trials, left: Copy, newest: int) -> None:
    """As after a copy with cp: the times of the files mean nothing. Newest first, so the oldest is the youngest."""
    order = sorted(left, key=lambda name: left[name][1])
    copy = {name: (content, (10**9 - order.index(name)) * 10**9) for name, (content, _) in left.items()}
    trials.add("newest", "after all files were copied, so that the older ones have the newer times", copy, [newest])


def _damage(trials: Trials, left: Copy, fresh: list[str], older: int, newest: int) -> None:
    """One file at a time, then all that came with the newest checkpoint."""
    needle = make_state(trials.data, newest)["model"]["0.bias"].numpy().tobytes()
    for name in fresh:
        content, changed = left[name]
        at = max(content.find(needle), 0) or len(content) // 2
        flipped = bytearray(content or b"?")
        flipped[min(at + 3, len(flipped) - 1)] ^= 0x40
        half = content[: len(content) // 2]
        ways = {"cut off in the middle": half, "empty": b"", "with one flipped bit": bytes(flipped)}
        for way, then in ways.items():
            copy = left | {name: (then, changed)}
            trials.add("damage", f"with {name} {way}", copy, [older, newest], way=way)
        copy = {other: entry for other, entry in left.items() if other != name}
        trials.add("damage", f"without {name}", copy, [older, newest], way="missing")
    copy = _spoil(left, fresh)
    trials.add("damage", f"with all files of step {newest} cut off", copy, [older], way="all")


def _spoil(left: Copy, names: list[str]) -> Copy:
    return left | {name: (left[name][0][: len(left[name][0]) // 3], left[name][1]) for name in names}


def _again(trials: Trials, disk: Disk, newest: int) -> None:
    """Whatever a kill in the last save left: the next save must work there. Rank 1 does it."""
    for moment in disk.moments:
        told = f"the next save, in what a kill -9 before {moment['before']} left behind"
        trials.add("again", told, moment["copy"], [newest + 1], save=newest + 1)


def _go_back(trials: Trials, left: Copy, fresh: list[str], older: int) -> None:
    """The newest is damaged, so the run went back to the older one and saves again, with keep=1."""
    begin = len(trials.list)
    with trials.disk("back", _spoil(left, fresh)) as disk:
        trials.save(trials.make(str(disk.folder), 1), disk, older + 1, older)
    for trial in trials.list[begin:]:
        trial |= {"kind": "back", "keep": 1}
        trial["told"] += ", when the newest was damaged, the run went on from the one before, and keep is 1"


def _full(trials: Trials, left: Copy, newest: int) -> None:
    raised = ""
    with trials.disk("full", left) as disk:
        store, disk.full = trials.make(str(disk.folder), KEEP), True
        try:
            store.save(newest + 1, make_state(trials.data, newest + 1))
        except Exception as error:  # noqa: BLE001 - that is what it should do
            raised = type(error).__name__
    trials.add("full", "a save on a full disk", keep(disk.folder), [newest], raised=raised)


def drive(checkpoints: Callable, data: torch.Tensor, *, steps: list[int]) -> tuple[dict, dict]:
    """Rank 0 saves, rank 1 loads; "trials": each with "got"."""
    box: list[Any] = [None]
    unsafe: list[str] = []
    with tempfile.TemporaryDirectory(dir=in_rank.place, prefix="kills-") as base:
        if dist.get_rank() == 0:
            trials = Trials(checkpoints, data, Path(base), unsafe)
            saver(trials, steps)
            box = [trials.list]
        dist.broadcast_object_list(box, src=0)
        if dist.get_rank() == 1:
            with watching(Disk(Path(base, "nowhere")), unsafe, scope_of(checkpoints)):
                for number, trial in enumerate(box[0]):
                    _load(checkpoints, data, trial, Path(base, f"{number}"))
    return {"trials": box[0] if dist.is_initialized() and dist.get_rank() == 1 else [], "unsafe": unsafe[:1]}, {}


def _load(checkpoints: Callable, data: torch.Tensor, trial: dict[str, Any], folder: Path) -> None:
    """Rank 1: one trial."""
    lay_out(trial.pop("copy"), folder)
    if "save" in trial:
        try:
            checkpoints(str(folder), KEEP).save(trial["save"], make_state(data, trial["save"]))
        except Exception as error:  # noqa: BLE001 - as in `load`
            trial["got"] = {"error": type(error).__name__, "text": _text(error, folder), "in": "save"}
            return
    trial["got"] = load(checkpoints, folder, trial.get("keep", KEEP))


def cases(rng: random.Random) -> list[GroupCase]:
    """One: two processes, three saves. As text the steps are in another order: "10" < "9"."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    data = torch.randn(16, 20, generator=generator, dtype=torch.float64)
    steps = [9, 10, 100 + rng.randint(0, 9)]
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
        text = f"After 2 saves with keep=2 there are {sizes[1]} bytes in the folder, after 3 saves {sizes[-1]}."
        return Wrong("keep", text, 0)
    return None
