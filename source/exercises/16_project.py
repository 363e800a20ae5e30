# %% [markdown]
# # Exercise 16: the project
#
# **Difficulty** hard · **Time** 4 to 5 hours · **You write** about 95 lines, 35 of them from earlier exercises ·
# **Points** 100
#
# You take one training job from one process to several, with the loop of the course (`course_lib.train`), as one does
# it before a run on expensive machines: plan, one process, several and equal, fast, unkillable, with a report.
#
# | stage | what is there afterwards | points | minutes |
# |---|---|---|---|
# | 1 plan | `plan`: the numbers of a run, before it runs | 10 | 40 |
# | 2 one | `runs/one`: one process, test accuracy at least 0.95 | 10 | 45 |
# | 3 ddp | `runs/ddp`: two ranks, the same job, equal to one process | 20 | 30 |
# | 4 speed | `runs/slow`, `runs/fast`: two thieves named from a trace, and gone | 20 | 60 |
# | 5 survival | `runs/killed`: kill -9, and the bits of `runs/ddp` all the same | 15 | 20 |
# | 6 hook | `runs/hook`: the gradients averaged by *your* all-reduce | 15 | 45 |
# | 7 report | `report.html`, and what follows from it in numbers | 10 | 30 |
#
# Everything lies beside this notebook: `project.py`, which you write in a cell below, the run folders, and the report.
#
# **How it is judged.** A check does not believe a run folder. It starts short parts of it again, with the configuration
# that is there and with the `project.py` of now, and compares: first steps, last steps, accuracy, speed. So train again
# after you have changed the network, and do not mend a file by hand. A check takes some seconds, up to about 15.
# `course check exercises/16_project` does all seven, for the folders that are there.
#
# **When a stage is not reached,** its check says what is wrong, in which folder, and what to do. Leave it and go on:
# every stage has its own points. Stage 3 needs `runs/one`; 4, 5 and 6 need `runs/ddp`; 7 needs all six folders.

# %%
import shutil
from statistics import mean, median

from IPython.display import IFrame

from course_lib import check, show, train
from course_lib.cli import main as course
from course_lib.launch.named import function
from course_lib.parallel.traces import read_spans, without_waiting
from course_lib.train.record import TrainRun

RECIPE = "project.py:recipe"


def fresh(folder):
    """The name of a run folder, without what an earlier run has left there: the next one begins at step 1."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


# %% [markdown]
# ## Your file
#
# The next cell writes `project.py`. Ranks are new processes, which import it; what you define elsewhere in the notebook
# they do not know. You come back to this cell: **stage 2** needs `recipe`, `Block` and `network`, **stage 6**
# `ring_all_reduce` and `hook`. Run it after each change.
#
# - `network(shape, classes)`: a small ResNet for images of 8x8. A convolution to 16 channels, then three blocks (16; 32
#   with stride 2; 64 with stride 2), the mean over the image, a linear layer. A block computes
#   relu(norm(conv(relu(norm(conv(x))))) + x); where channels or stride change, x goes through a 1x1 convolution. That
#   makes 77,530 parameters; another network will do as well.
# - **GroupNorm, not BatchNorm.** BatchNorm takes mean and deviation over the samples of *one rank*, so two ranks
#   compute something else than one process. GroupNorm looks at each sample for itself. No dropout, for the same reason.
# - `recipe()`: the configuration. The embedded digits, `DataConfig("digits", global_batch=48)`; your network,
#   `ModelConfig(f"{__file__}:network")`; rate, epochs and warm-up, `OptimConfig(lr=…, epochs=…, warmup_epochs=…)`.
# - **Your own images** instead of the digits: `DataConfig("imagefolder:PATH", side=32, global_batch=48)`, with a folder
#   for each class below PATH. Then stage 2 asks for half of the way from guessing to all right (0.55 with ten classes),
#   and `slow_disk` loads them, too: `image_folder(DataConfig("imagefolder:PATH", side=32), seed=0)` of
#   `course_lib.train.sources`.


# %% file="project.py" solution="project"
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from course_lib.train.config import Config
from course_lib.train.data import DataConfig
from course_lib.train.model import ModelConfig
from course_lib.train.optim import OptimConfig
from course_lib.train.sources import digits


def recipe():
    """The job: which data, which network, which steps."""
    # about 5 lines; Config(data=..., model=..., optim=...)
    ### BEGIN SOLUTION
    return Config(
        data=DataConfig("digits", global_batch=48),
        model=ModelConfig(f"{__file__}:network"),
        optim=OptimConfig(lr=0.1, epochs=4, warmup_epochs=1),
    )
    ### END SOLUTION


class Block(nn.Module):
    """Two convolutions of 3x3, and a way around them."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        # about 6 lines
        ### BEGIN SOLUTION
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)])
        same = stride == 1 and inside == outside
        self.around = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)
        ### END SOLUTION

    def forward(self, x):
        # about 2 lines
        ### BEGIN SOLUTION
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.around(x))
        ### END SOLUTION


def network(shape, classes):
    """A small ResNet. shape: of a sample, (1, 8, 8); it returns (batch, classes)."""
    # about 3 lines
    ### BEGIN SOLUTION
    stem = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    ### END SOLUTION


class SlowDisk(Dataset):
    """Given, for stage 4: samples that take about two milliseconds each to arrive."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.samples[0, index]  # (epoch, index)


def slow_disk():
    """Given, for stage 4: the digits from that disk. Training data, test data, number of classes."""
    found = digits(DataConfig(), seed=0)
    return SlowDisk(found.train), SlowDisk(found.test), found.classes


def ring_all_reduce(tensor):
    """Stage 6: sum over all ranks, in place. tensor: one-dimensional, of any length, the same on all ranks."""
    # about 13 lines, from exercise 03
    ### BEGIN SOLUTION
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(tensor, size)
    for step in range(2 * (size - 1)):
        mine = chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(mine)
        sending = dist.isend(chunks[(rank - step) % size], right)
        dist.irecv(arrived, left).wait()
        sending.wait()
        if step < size - 1:
            mine += arrived  # reduce-scatter
        else:
            mine.copy_(arrived)  # all-gather
    ### END SOLUTION


def hook(state, bucket):
    """Stage 6: DDP's comm hook. state: the process group; returns a Future with the average of bucket.buffer()."""
    # about 5 lines
    ### BEGIN SOLUTION
    gradients = bucket.buffer()
    ring_all_reduce(gradients)
    done = torch.futures.Future()
    done.set_result(gradients.div_(dist.get_world_size(state)))
    return done
    ### END SOLUTION


# %% [markdown]
# ## 1. Plan
#
# **Goal.** `plan(parameters, samples, global_batch, ranks, epochs, warmup_epochs, lr, reference)` returns a dict:
#
# | | |
# |---|---|
# | `gradient_bytes` | of float32 gradients of all parameters |
# | `sent_bytes` | what *one rank* sends in a step, by a ring |
# | `steps` | of the whole run. The samples that are left at the end of an epoch are a step, too |
# | `samples_of_ranks` | a list: how many samples each rank has in a full step |
# | `samples_at_the_end` | the same for the last step of an epoch. Samples are dealt to the ranks like cards |
# | `peak` | the highest rate, for SGD: `lr` is right for `reference` samples a step |
# | `first_rate` | of step 1. Warm-up takes `round(warmup_epochs * steps of an epoch)` steps; without it, the peak |
#
# A global batch that the ranks cannot share equally is a `ValueError`, as in the loop. An epoch may come out even, the
# last step may leave some ranks without a sample, and one rank alone sends nothing.
#
# For example, 1000 parameters, 103 samples in batches of 24 on 4 ranks, 3 epochs, 1 of warm-up, 0.1 for 48: 4000 bytes,
# 6000 sent, 15 steps, `[6, 6, 6, 6]` and `[2, 2, 2, 1]`, a peak of 0.05 that begins with 0.01.


# %% solution="plan"
def plan(parameters, samples, global_batch, ranks, epochs, warmup_epochs, lr, reference):
    """The numbers of a run, before it runs."""
    # about 15 lines
    ### BEGIN SOLUTION
    if global_batch % ranks:
        raise ValueError(
            f"{global_batch} samples cannot be shared by {ranks} ranks; {global_batch // ranks * ranks} can"
        )
    gradients = 4 * parameters
    per_epoch = -(-samples // global_batch)
    last = samples - (per_epoch - 1) * global_batch
    peak = lr * global_batch / reference
    warmup = round(warmup_epochs * per_epoch)
    return {
        "gradient_bytes": gradients,
        "sent_bytes": 2 * (ranks - 1) / ranks * gradients,
        "steps": per_epoch * epochs,
        "samples_of_ranks": [global_batch // ranks] * ranks,
        "samples_at_the_end": [len(range(rank, last, ranks)) for rank in range(ranks)],
        "peak": peak,
        "first_rate": peak / max(warmup, 1),
    }
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# Your job on two ranks. (The digits are 1,437 samples to train. This needs `network`; until you have it, put a number
# in its place.) Keep what it says in sight: stages 2 and 3 show whether it comes true.

# %% tags=["show"]
parameters = sum(p.numel() for p in function("project.py:network")((1, 8, 8), 10).parameters())
print(f"{parameters:,} parameters")
plan(parameters, 1437, global_batch=48, ranks=2, epochs=4, warmup_epochs=1, lr=0.1, reference=48)

# %% graded="check_project_plan" points=10
check.project_plan(plan)

# %% [markdown]
# ## 2. One process
#
# **Goal.** `runs/one`: the job of your `recipe`, on one rank, to its end, with a test accuracy of at least **0.95**
# (for the digits).
#
# **Predict** the number of steps, and the loss before anything is learned: ten classes, so a guess costs ln 10 nats. If
# the first loss is far from that, something is wrong already.

# %% tags=["show"]
one = train(RECIPE, ranks=1, dir=fresh("runs/one"))
print(one.plan)
show.loss(one)

# %% graded="check_project_one" points=10
check.project_one()

# %% [markdown]
# *Not reached?* A loss of nan, or one that rises: a smaller rate, or a longer warm-up. A loss that falls slowly: more
# epochs. Training is good and the test is not: look at the network, each class needs its own output.
#
# ## 3. Two ranks, the same job
#
# **Goal.** `runs/ddp`: the same recipe on two ranks, with the *same global batch*, and **equal to one process**: in
# float64 the weights after each of ten steps differ by rounding only. The judge runs that itself. (With more cores you
# may take more ranks; then take as many in stages 4 to 6.)
#
# **Predict**, and write it down: how many times as fast as one process will two ranks be, in samples a second? The
# digits are tiny: a step is short, and each one ends with an all-reduce. No number is wrong here; stage 7 compares.


# %% solution="predicted"
# predicted_speedup = ...
### BEGIN SOLUTION
predicted_speedup = 1.3
### END SOLUTION

# %% tags=["show"]
ddp = train(RECIPE, ranks=2, dir=fresh("runs/ddp"))
print(ddp.plan)
print(f"{one.samples_per_s:,.0f} samples/s on one rank, {ddp.samples_per_s:,.0f} on two")
show.loss(one, ddp)

# %% [markdown]
# One line, and not two. In float32 the last digits differ, since two ranks add in another order, and the difference
# grows; in float64 it takes longer until anything shows.
#
# Two ranks may well be **slower** than one, on two cores and with images of 8x8. What counts in this project is that
# your figures are true, not that they are large.

# %% graded="check_project_ddp" points=20
check.project_ddp()

# %% [markdown]
# *Not reached?* The usual reasons: BatchNorm; a rate multiplied by the ranks although the global batch stayed;
# randomness in the network that differs by rank; a parameter that one rank alone uses. The check tries and names them.
#
# ## 4. Speed
#
# Now the job gets its digits from a slow disk (`slow_disk`), and somebody has set `--data.batch 6`: a rank takes 6
# samples at a time through the network, and adds up gradients. **Two thieves**, and a trace of three steps to find them
# in.

# %%
SLOW = {"data.name": "project.py:slow_disk", "optim.epochs": 2, "measure.profile_at": 20}

# %% tags=["show"]
slow = train(RECIPE, ranks=2, dir=fresh("runs/slow"), **SLOW, **{"data.batch": 6})
print(f"{slow.samples_per_s:,.0f} samples/s")
show.spans(read_spans("runs/slow"))

# %% [markdown]
# `read_spans` makes spans of the trace, as you know them from exercise 11: `(rank, kind, start, end)`, in microseconds,
# with the kinds forward, backward, optimizer, data, communication. Each forward and each backward is one span.
#
# **Goal 1.** `evidence()` reads the trace of `runs/slow` and returns
#
# | | |
# |---|---|
# | `thief` | `"data"` or `"communication"`: which of the two takes more of the time |
# | `share` | that part of the time, 0 to 1, mean over the ranks. The judge's own reading may differ by 0.05 |
# | `passes` | how often a rank goes forward in a step; small passes cost far more than one large one |
#
# Communication means *exposed*: nothing is computed beside it. And a rank that comes early waits inside of its
# all-reduce for the other one, which is not the network's fault: `without_waiting(spans)` leaves that out, see
# `course_lib/parallel/traces.py`. Divide by the time of all recorded steps.
#
# Your `where_time_goes` from exercise 11 is most of it. (The judge reads the same file, and makes another trace.)


# %% solution="evidence"
def evidence():
    """What the trace of runs/slow shows: {"thief": ..., "share": ..., "passes": ...}."""
    # about 10 lines, with where_time_goes from exercise 11
    ### BEGIN SOLUTION
    spans = read_spans("runs/slow")
    table = where_time_goes(without_waiting(spans))
    step = sum(table[0].values())
    shares = {kind: mean(parts[kind] for parts in table.values()) / step for kind in ("data", "exposed")}
    forwards, steps = (sum(span[:2] == (0, kind) for span in spans) for kind in ("forward", "optimizer"))
    return {
        "thief": "data" if shares["data"] > shares["exposed"] else "communication",
        "share": max(shares.values()),
        "passes": forwards / steps,
    }


def where_time_goes(spans):
    step = max(end for *_, end in spans) - min(start for _, _, start, _ in spans)
    found = {}
    for rank in sorted({rank for rank, *_ in spans}):

        def length(*kinds, rank=rank):
            return union_length([(s, e) for r, kind, s, e in spans if r == rank and kind in kinds])

        compute = length("forward", "backward", "optimizer")
        both = length("communication", "forward", "backward", "optimizer")
        busy = length("data", "communication", "forward", "backward", "optimizer")
        parts = {"compute": compute, "exposed": both - compute, "data": busy - both, "idle": step - busy}
        found[rank] = {part: us / 1000 for part, us in parts.items()}
    return found


def union_length(pieces):
    total, reached = 0, float("-inf")
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
    ### END SOLUTION


# %% tags=["show"]
evidence()

# %% [markdown]
# **Goal 2.** `runs/fast`: the same data from the same disk, the same global batch, network and ranks, at least **1.3
# times** as fast. The judge runs both again, in turn. Write the options that are needed (lesson 08 and
# `course_lib/train/data.py` know them).
#
# **Predict:** a step was 24 samples x 2 ms of waiting, and some passes. What is left when both thieves are gone?


# %% solution="cures"
# cures = {"option": value, ...}
### BEGIN SOLUTION
cures = {"data.workers": 4}  # and no data.batch: all samples of a rank at once
### END SOLUTION

# %% tags=["show"]
fast = train(RECIPE, ranks=2, dir=fresh("runs/fast"), **SLOW, **cures)
print(f"{slow.samples_per_s:,.0f} samples/s before, {fast.samples_per_s:,.0f} now")
show.spans(read_spans("runs/fast"))

# %% graded="check_project_speed" points=20
check.project_speed(evidence)

# %% [markdown]
# *Not reached?* Look at the two pictures, one under the other: are the hatched pieces gone, and is there one forward a
# step? When one thief stays, its option is not set.
#
# ## 5. Survival
#
# **Goal.** `runs/killed`: the job of `runs/ddp`, in which a rank gets kill -9 in the middle, and which goes on from its
# newest checkpoint and ends with **the very bits** of `runs/ddp`. (Train both on the same machine: another one rounds
# differently.)
#
# Press a button when the curve has passed step 30 or so, or run the cell after it: it kills rank 1 after step 70 when
# nobody has pressed. From a terminal the same is `kill -9` with the number of a process that `ps` shows. torchrun
# starts all ranks again, up to three times.

# %% tags=["show"]
panel = show.kill_button(RECIPE, ranks=2, dir=fresh("runs/killed"), restarts=3, **{"run.save_every": 10})
panel

# %% tags=["show"]
killed = panel.wait(rank=1, step=70)
print(*panel.kills, sep="\n")
show.survived(ddp, killed)

# %% graded="check_project_survival" points=15
check.project_survival()

# %% [markdown]
# *Not reached?* "Nobody killed it": the run was over before the button was pressed; run both cells again. Other bits:
# `project.py` or the recipe was changed after `runs/ddp`. Train that again, then this.
#
# ## 6. Your own all-reduce
#
# **Goal.** `runs/hook`: the job of `runs/ddp`, with every gradient averaged by `ring_all_reduce` of your `project.py`.
# Go back to the cell that writes the file, write it and `hook`, run the cell. The judge tests `ring_all_reduce` with
# the cases of exercise 03 (sum; any length, 1 to 4 ranks, bits equal on all ranks, bytes of a ring), then your hook on
# a few buckets, and then whether `runs/hook` was trained with it and equals DDP up to rounding.
#
# DDP calls `hook(state, bucket)` for each bucket whose gradients are ready. `bucket.buffer()` is one flat tensor, to be
# summed in place; DDP does *not* divide for you, and it waits for the Future that you return:
# `done = torch.futures.Future(); done.set_result(tensor)`. (Lesson 07.)
#
# **Predict:** is it faster or slower than gloo's all-reduce, which is written in C++?

# %% tags=["show"]
hooked = train(RECIPE, ranks=2, dir=fresh("runs/hook"), **{"ddp.comm_hook": "project.py:hook"})
print(f"{ddp.samples_per_s:,.0f} samples/s with gloo's all-reduce, {hooked.samples_per_s:,.0f} with yours")
show.loss(ddp, hooked)

# %% graded="check_project_hook" points=15
check.project_hook()

# %% [markdown]
# *Not reached?* A loss that falls at half the rate: divided twice; at twice the rate or to nan: not divided. "Waits in
# irecv": a rank sends and nobody receives, as in exercise 02. When exercise 03 is not done yet, do it first.
#
# ## 7. The report
#
# **Goal 1.** `report.html` about the six runs, made by `course report` after the last of them.

# %% tags=["show"]
RUNS = ["runs/one", "runs/ddp", "runs/slow", "runs/fast", "runs/killed", "runs/hook"]
course(["report", *RUNS, "--out", "report.html"])
IFrame("report.html", width="100%", height=500)

# %% [markdown]
# **Goal 2.** `conclusions()` returns what the folders say, within 2 %:
#
# | | |
# |---|---|
# | `speedup` | median samples/s of `runs/ddp` / that of `runs/one`, over the rows of training |
# | `efficiency` | that, by the number of ranks |
# | `comm_share` | median of `comm_share` in the rows of `runs/ddp`: communication that nothing hides (within 0.02) |
# | `predicted_speedup` | what you predicted in stage 3, before you knew |
# | `off_by` | measured / predicted |
#
# `TrainRun.read("runs/ddp").rows("train")` is a list of dicts, a row of `metrics.jsonl` each.


# %% solution="conclusions"
def conclusions():
    """Numbers about runs/one and runs/ddp: speedup, efficiency, comm_share, predicted_speedup, off_by."""
    # about 12 lines
    ### BEGIN SOLUTION
    one, ddp = TrainRun.read("runs/one"), TrainRun.read("runs/ddp")

    def middle(run, key):
        return median(row[key] for row in run.rows("train"))

    speedup = middle(ddp, "samples_per_s") / middle(one, "samples_per_s")
    return {
        "speedup": speedup,
        "efficiency": speedup / ddp.facts["ranks"],
        "comm_share": middle(ddp, "comm_share"),
        "predicted_speedup": predicted_speedup,
        "off_by": speedup / predicted_speedup,
    }
    ### END SOLUTION


# %% tags=["show"]
conclusions()

# %% graded="check_project_report" points=10
check.project_report(conclusions)

# %% [markdown]
# An efficiency of 50 % on two cores is no failure. It is a figure: with it you would *not* rent a second machine for
# this job, and you would say why. With ResNet-50, whose step computes for long and sends little beside that, the same
# commands are worth it: lesson 16 has them for eight A100s.
