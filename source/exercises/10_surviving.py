# %% [markdown]
# # Exercise 10: surviving
#
# **Difficulty** hard · **Time** 60 minutes · **You write** about 45 lines · **Points** 12
#
# Two parts of a training script: checkpoints that outlive any kill, and a loop that goes on from them as if nothing
# had happened.
#
# **Goal 1.** A class `Checkpoints(folder, keep=2)` with two methods.
#
# ```python
# checkpoints.save(step, state)       # state: a dict of tensors, numbers, lists and dicts
# checkpoints.load_newest()           # (step, state) of the newest whole one, or None when there is none
# ```
#
# | | |
# |---|---|
# | kill -9 | at any moment of `save`, also amid a write: the new checkpoint or the one before is found, whole |
# | power cut | what was not fsynced is lost: the same holds, and after `save` has returned its step is safe |
# | damage | a file that is cut off, empty, missing or has one flipped bit: the checkpoint before it is found |
# | newest | by the number of the step, whatever the times of the files are |
# | keep | the newest `keep` stay, older ones go. A damaged one with a higher step, left from before, does not count |
# | leftovers | what a killed `save` has left is in nobody's way |
# | full disk | `save` raises the error, and the older ones are still there |
# | data only | nothing in a checkpoint is run when it is loaded: `torch.load(..., weights_only=True)` |
#
# Names and number of files are up to you. The check watches one process that saves, copies the folder at each moment
# at which a kill could come, and lets another process load every copy.
#
# **Four tools**
#
# - `torch.save(state, buffer)` with `buffer = io.BytesIO()`: then `buffer.getvalue()` has the bytes.
# - `hashlib.sha256(content).digest()`: 32 bytes that change when any bit of the content does.
# - `file.flush()`, then `os.fsync(file.fileno())`: the bytes of an open file are on the disk.
# - `path.replace(other)`: gives a file another name, in one step, also when there is a file of that name.

# %%
import hashlib
import io
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import check, run, show


# %% solution="Checkpoints"
class Checkpoints:
    """Checkpoints in a folder; the newest `keep` stay."""

    def __init__(self, folder, keep=2):
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step, state):
        """Put the state of a step on the disk, so that it is there as a whole or not at all; then remove old ones."""
        # about 14 lines
        ### BEGIN SOLUTION
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        beside = self.folder / "unfinished"
        with beside.open("wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / f"step_{step:08d}")
        older = [path for path in self.newest_first() if self.step_of(path) < step]
        for path in older[self.keep - 1 :]:
            path.unlink()
        ### END SOLUTION

    def load_newest(self):
        """(step, state) of the newest whole checkpoint; None when there is none."""
        # about 9 lines; write other methods if you like
        ### BEGIN SOLUTION
        for path in self.newest_first():
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                return self.step_of(path), torch.load(io.BytesIO(content[32:]), weights_only=True)
            print(f"{path} is damaged, and is skipped.")
        return None

    def newest_first(self):
        return sorted(self.folder.glob("step_*"), key=self.step_of, reverse=True)

    def step_of(self, path):
        return int(path.name.removeprefix("step_"))
        ### END SOLUTION


# %% [markdown]
# ## See it run
#
# Three saves with `keep=2`, then the newest checkpoint is cut in half. **Predict** which files are there, and what is
# found.

# %% tags=["show"]
with tempfile.TemporaryDirectory() as folder:
    checkpoints = Checkpoints(folder)
    for step in (9, 10, 11):
        checkpoints.save(step, {"weight": torch.full((100,), float(step))})
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    print(*(f"{path.name}: {path.stat().st_size} bytes" for path in files), sep="\n")
    os.truncate(files[-1], files[-1].stat().st_size // 2)
    print("found:", checkpoints.load_newest()[0])

# %% graded="check_checkpoints" points=6
check.checkpoints(Checkpoints)

# %% [markdown]
# **Goal 2.** `train(model, optimizer, batch, checkpoints, last, every)`: a loop of `last` steps, counted from 1, that
# can be killed in any of them, started again, and ends with the same bits.
#
# | argument | |
# |---|---|
# | `model` | a `DistributedDataParallel`; `model.module` has BatchNorm, and dropout that draws from torch's generator |
# | `optimizer` | SGD with momentum; its rate stays |
# | `batch(step)` | inputs and labels of this rank in that step; the loss is their mean cross-entropy |
# | `checkpoints` | as in the first part, on a network disk: **some ranks may not see the newest one yet** |
# | `every` | after each step that `every` divides, and after the last one, there is a checkpoint |
#
# | | |
# |---|---|
# | go on | with the step after the newest checkpoint: no step twice, none left out. A finished run does nothing |
# | bits | after every step the weights of every rank are those of a run that nobody killed |
# | dropout | another mask in each step and on each rank |
# | one writer | rank 0 saves; all ranks begin with the same checkpoint |
# | state | a dict whose names are those of the bare network: no `module.` |
#
# `dist.broadcast_object_list([value], src=0)` sends any Python value from rank 0 into the lists of all. The check has
# prepared DDP so that its sums have the same order in each step (the lesson says why that is needed).


# %% solution="train"
def train(model, optimizer, batch, checkpoints, last, every):
    """Train to step `last`, from the newest checkpoint if there is one."""
    # about 18 lines
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    found = [checkpoints.load_newest() if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    done, state = found[0] or (0, None)
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(done + 1, last + 1):
        inputs, labels = batch(step)
        torch.manual_seed(1000 * step + rank)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if rank == 0 and (step % every == 0 or step == last):
            checkpoints.save(step, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
    ### END SOLUTION


# %% [markdown]
# ## See it run
#
# Your two parts together, on three ranks: once left alone, and once killed in step 25 and started again. `batch` notes
# the loss of the network before each step. **Look:** do the two lines lie on each other?


# %% tags=["show"]
def launch(folder, killed_at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    model, losses = DistributedDataParallel(model), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    (model.eval()(torch.zeros(1, 8)).sum() * 0).backward()
    model.train()

    def batch(step):
        if step == killed_at:
            raise KeyboardInterrupt
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        y = (x.sum(1) > 0).long()
        with torch.no_grad():
            losses[step] = F.cross_entropy(model.module.eval()(x), y).item()
        model.train()
        return x, y

    with suppress(KeyboardInterrupt):
        train(model, optimizer, batch, Checkpoints(folder), 40, 10)
    return losses


with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as hurt:
    straight = run(launch, ranks=3, args=(calm, None)).results[0]
    before, after = (run(launch, ranks=3, args=(hurt, at)).results[0] for at in (25, None))
print("killed in step 25, went on with step", min(after))
killed = before | after
show.curves(
    {"left alone": [*straight.values()], "killed": [killed[s] for s in straight]}, "step", "loss on rank 0 (nats)"
)

# %% graded="check_train" points=6
check.train(train)
