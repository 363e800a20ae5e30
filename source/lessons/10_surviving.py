# %% [markdown]
# # 10 · Surviving
#
# **Afterwards you can** say what a checkpoint must hold so that a run goes on bit for bit; write it so that a kill at
# any moment leaves a whole one; and let a run go on by itself when a rank dies.
#
# **Time** 40 minutes to read; the cells run in about a minute.

# %%
import io
import json
import os
import pickle
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run, show, train

box = tempfile.TemporaryDirectory(prefix="surviving-")  # it goes with the kernel
base = Path(box.name)

# %% [markdown]
# On many machines something fails every day: a GPU, a cable, a power supply; or the scheduler wants its node back. A
# run that must begin anew then may never end. So it saves its state now and then, and is started again.
#
# ## What must be saved?
#
# "The model", say many pages, and the official tutorial's snapshot has the weights and the number of epochs. We try.
# Ten steps with Adam and dropout on three ranks; after the fifth we throw all away, build it anew, and load what was
# kept. Then we compare the final weights with those of ten steps in one go.


# %%
def build(settle):
    sizes = [nn.Linear(64, 256), nn.Dropout(0.1), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)]
    model = DistributedDataParallel(nn.Sequential(*sizes))
    if settle:
        (model.eval()(torch.zeros(1, 64)).sum() * 0).backward()
        model.zero_grad()
    return model.train(), torch.optim.Adam(model.parameters(), lr=0.01)


def steps(model, optimizer, first, last, seeded):
    for step in range(first, last + 1):
        mine = torch.Generator().manual_seed(10 * step + dist.get_rank())  # the data of this step and rank
        x, y = torch.randn(32, 64, generator=mine), torch.randint(10, (32,), generator=mine)
        if seeded:
            torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


# %%
def ten_steps(kept, seeded=False, settle=False):
    torch.manual_seed(dist.get_rank())
    model, optimizer = build(settle=False)
    steps(model, optimizer, 1, 5, seeded)
    if kept:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.manual_seed(100 + dist.get_rank())  # another process has other random numbers
        model, optimizer = build(settle)
        model.module.load_state_dict(state["model"])
        if "optimizer" in kept:
            optimizer.load_state_dict(state["optimizer"])
    steps(model, optimizer, 6, 10, seeded)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def four_tries():
    straight, seeded = ten_steps(""), ten_steps("", seeded=True)
    tries = [ten_steps("weights") - straight, ten_steps("weights, optimizer") - straight]
    tries += [ten_steps("weights, optimizer", True, settle) - seeded for settle in (False, True)]
    return [difference.abs().max().item() for difference in tries]


# %% [markdown]
# **Predict** the four differences. Which one is zero?

# %%
names = ["weights", "+ optimizer", "+ random numbers of the step", "+ DDP settled"]
for name, difference in zip(names, run(four_tries, ranks=3).results[0], strict=True):
    print(f"{name:<30} largest difference of a weight: {difference:.1e}")

# %% [markdown]
# - **Weights alone are not enough.** Adam keeps two averages for each weight; without them it starts cold, and takes
#   large steps in the direction of single gradients.
# - **Random numbers count.** Dropout drew other masks. You may save the generator of *every* rank. Simpler: let each
#   random number be a function of (seed, step, rank), as in lesson 08, so that there is nothing to save. A checkpoint
#   is then {model, optimizer, scaler of fp16, step}. You can read that it needs `train_sampler.state_dict()`, too:
#   `DistributedSampler` has no such method, and the step is enough.
# - **The rest is DDP.** Its first backward after it was built has other buckets than the later ones (lesson 07). With
#   three ranks and more, a float sum then runs in another order, and the last bits differ. A thrown-away backward right
#   after wrapping settles the buckets; the course's `wrap` does it. With two ranks nothing shows, since a + b = b + a.
#
# Does the last bit matter? Not for accuracy. It matters for you: if "resumed" means "the same bits", a test can tell
# whether anything was forgotten. If it only means "nearly", nobody notices for months that momentum is lost.
#
# ## How to save, and how to load
#
# "Saving the whole DDP object makes a huge file." **Predict:** how much larger is it?


# %%
def sizes():
    model = DistributedDataParallel(nn.Linear(64, 256))
    for thing in (model, model.state_dict(), model.module.state_dict()):
        torch.save(thing, buffer := io.BytesIO())
        buffer.seek(0)
        try:
            print(f"{len(buffer.getvalue())} bytes, can be loaded: {list(torch.load(buffer))}")
        except pickle.UnpicklingError as error:
            print(f"{len(buffer.getvalue())} bytes, refused: {str(error)[:24]}")


run(sizes, ranks=1)

# %% [markdown]
# It is hardly larger. The reason to leave it is another one: it is a *pickle*, code that runs when it is loaded, needs
# your classes again and a process group, and `torch.load` refuses it. Since torch 2.6 it loads data only
# (`weights_only=True`); many pages still show the old call. The second way loads, but with names of the wrapper: a bare
# network answers "Missing key(s)", or with `strict=False` loads *nothing* and says nothing. `torch.compile` adds
# `_orig_mod.` in the same way. So save `model.module.state_dict()`. Load with `map_location="cpu"`, or every rank puts
# its copy on the GPU that rank 0 had.
#
# **Who loads?** "Rank 0 loads, then the parameters are broadcast" leaves the buffers and the optimizer of the other
# ranks as they were: from the next step on each rank has weights of its own, without an error. All ranks must load the
# same whole state. **Who saves?** Rank 0: all have the same. (One template calls `save_checkpoint(model, path, rank)`,
# which uses an `optimizer` it never got: rank 0 stops with a NameError, and the others report "connection closed".)
#
# ## kill -9 in the middle of a save
#
# A process saves 8 MB again and again, and is killed at a random moment; six times. First as most scripts do, with
# `torch.save(state, path)`; then into a file beside it, which gets the right name when it is whole. **Predict:** how
# many of the six files can be read?


# %%
def in_place(state, path):
    torch.save(state, path)


def beside(state, path):
    with path.with_suffix(".unfinished").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".unfinished").replace(path)


# %%
def killed(save, state, path):
    """Save, in a process of its own that is killed after a while; then look whether the file can be read."""
    save(state, path)
    if (child := os.fork()) == 0:
        while True:
            save(state, path)
    time.sleep(random.uniform(0.05, 0.15))
    os.kill(child, 9)
    os.waitpid(child, 0)
    try:
        return torch.equal(torch.load(path)["weight"], state["weight"])
    except (RuntimeError, EOFError):
        return False


def readable_after_kills(save):
    with tempfile.TemporaryDirectory() as folder:
        state = {"weight": torch.ones(2_000_000)}
        return sum(killed(save, state, Path(folder, "checkpoint.pt")) for _ in range(6))


for save in (in_place, beside):
    print(f"{save.__name__:<9} {run(readable_after_kills, ranks=1, args=(save,)).results[0]} of 6 can be read")

# %% [markdown]
# In place, the old checkpoint is gone at the first byte of the new one. A **rename** is one step for the system: a
# reader sees the old file or the new one. `flush` gives Python's buffer to the system, and `fsync` waits until it is
# on the disk; without it, a power cut can leave the new name with an empty file.
#
# Does a damaged file at least announce itself? We flip one bit in a weight. **Predict:** what does `torch.load` say?

# %%
torch.save({"weight": torch.arange(1.0, 9.0)}, buffer := io.BytesIO())
content = bytearray(buffer.getvalue())
at = content.find(torch.arange(1.0, 9.0).numpy().tobytes())
content[at + 7] ^= 0x40  # in the second number
torch.load(io.BytesIO(content))

# %% [markdown]
# Nothing. So a checkpoint carries a checksum. The loop's own checkpoints (`course_lib/train/checkpoint.py`) are made in
# this order: write into a hidden folder; fsync; a manifest with the sha256 of each file; fsync; rename; fsync the
# folder, for the name; read it back; and only then remove older ones. A damaged one is skipped with a sentence, and the
# one before is taken.
#
# ## A button that kills a rank
#
# First a run that nobody disturbs.

# %%
options = {"optim.epochs": 4, "model.norm": "batch", "run.save_every": 10}
calm = train("digits", ranks=3, dir=base / "calm", **options)

# %% [markdown]
# Now the same under torchrun's `--max-restarts=3`, in the background. As soon as the curve moves, **press a button**,
# more than once if you like. **Predict:** what do the other two ranks do? From which step will it go on?

# %%
panel = show.kill_button("digits", ranks=3, dir=base / "hurt", restarts=3, **options)
panel

# %% [markdown]
# Run the next cell when you have pressed. (If you have not, it kills rank 1 for you.)

# %%
hurt = panel.wait(rank=1, step=45)
print(*panel.kills, sep="\n")
show.survived(calm, hurt)

# %% [markdown]
# The orange line lies on the blue one, and the difference below is zero: not small, zero. What happened? The killed
# rank could say nothing. The others were in an all-reduce with it and got "connection closed by peer". torchrun saw a
# child die, ended the others, and started **all** ranks again. (You can read that each process is "the smallest unit
# that is restarted". It is not: one dies, all are restarted.) Each rank ran the program from its first line; the
# *program* found its newest checkpoint. `--max-restarts` alone restarts a script without checkpoints at step 1. And the
# loss rows after the checkpoint, written by the run that was killed, were cut off, so nothing is there twice.
#
# The weights, too:


# %%
def newest(run):
    path = max((run.dir / "checkpoints").iterdir())
    return torch.load(path / "state.pt", map_location="cpu", weights_only=True)["model"]


one, other = newest(calm), newest(hurt)
all(torch.equal(one[name], other[name]) for name in one)

# %% [markdown]
# One more detail for clusters: after a restart gloo finds addresses of dead processes in torchrun's store, and hangs or
# fails (pytorch#135712). The loop meets in a fresh part of the store each time (`course_lib/train/meeting.py`).
#
# ## Stopping in good order
#
# kill -9 costs what came after the last checkpoint. Most ends are announced: Slurm sends SIGUSR1 or SIGTERM some time
# before the limit, Kubernetes and spot machines SIGTERM, you press Ctrl-C. The loop notes the signal, finishes its step
# and tells the others with the next sum of the loss: so **all ranks agree on the same step**. Were each to stop when
# its own signal comes, one would leave while another waits in an all-reduce. `--run.max_minutes` is the same by the
# clock, and `--run.stop_after` by the step, which we use here.
#
# Then the scheduler gives us two ranks instead of three. **Predict:** will the loss still be the same, bit for bit?

# %%
short = {"optim.epochs": 1, "model.dropout": 0.0}
straight = train("digits", ranks=3, dir=base / "straight", **short)
stopped = train("digits", ranks=3, dir=base / "moved", **short, **{"run.stop_after": 20})
print(stopped.status, "because", json.loads((base / "moved" / "status.json").read_text())["why"])

# %%
moved = train("digits", ranks=2, dir=base / "moved", **short)
show.survived(straight, moved, labels=["3 ranks", "3 ranks, then 2"])

# %% [markdown]
# Until step 20 the bits are equal. From there on each step has the same samples, because the order does not depend on
# the number of ranks (lesson 08), but two ranks sum in another order than three: the last digits differ, and the curve
# is the same for the eye. (We left dropout out. Its masks are drawn by step *and rank*, so with it the two runs would
# part further, as two runs with other seeds do.) The loop says so when it goes on.
#
# **How does a run tell how it ended?** torchrun ends with 1 for every failure, and also when it got SIGTERM and the
# ranks stopped in good order. So the loop writes `status.json`: finished, stopped, failed, and why; judge by that.
#
# ## In three lines
#
# - A checkpoint is {model, optimizer, scaler, step} of the bare network, as data; randomness is a function of the step.
# - Write beside, checksum, fsync, rename, then remove the old; one rank writes, all load the same.
# - A restart begins all ranks anew: the program finds its checkpoint, and a test shows that the bits are the same.
#
# ## On A100s
#
# ResNet-50 has 97.5 MiB of weights, and SGD's momentum is as large: a checkpoint of about 200 MB, once an epoch. On
# eight A100s 90 epochs take about 3 hours with AMP (NVIDIA DeepLearningExamples, DGX A100 80GB, 21.03), so an epoch
# about two minutes: a kill costs at most that, and the start. `--run.save_in_background` copies the state first and
# writes it while training goes on. Measure how long a save takes on *your* file system, and save so often that what a
# kill costs on average and what saving costs are about equal. Large models whose state no single rank holds need
# `torch.distributed.checkpoint`, in lesson 12.
#
# ## Exercise
#
# [Exercise 10: surviving](../exercises/10_surviving/10_surviving.ipynb) Write checkpoints that no kill can harm, and a
# loop that goes on from them with the same bits. About 60 minutes.
