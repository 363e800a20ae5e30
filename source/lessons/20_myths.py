# %% [markdown]
# # 20 · Myths, put to the test
#
# **Afterwards you can** settle a claim about distributed training with ten lines and a run, and you have done so for
# fifteen that are widely read.
#
# **Time** 25 minutes to read; the cells run in about half a minute. Read lessons 05 to 08 first: what they have tested
# already stands in the table at the end.
#
# Each claim is in our own words. **Predict** before you run its cell: does it hold? The verdict is not written down
# here, it comes out of the run.

# %%
import gc
import inspect
import math
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, random_split

from course_lib import run, show


def verdict(claim, holds):
    print("true:  " if holds else "false: ", claim)


def calls(r, op):
    """How many such calls rank 0 made."""
    return sum(m.op == op and m.rank == 0 for m in r.messages)


# %% [markdown]
# ## Samplers
#
# **1. "A new sampler and loader in each epoch leak memory."** We make one, keep only a weak reference, and look whether
# it is still there.

# %%
loader = DataLoader(range(8), batch_size=2, sampler=DistributedSampler(range(8), 2, 0))
first, gone = list(loader.sampler), (weakref.ref(loader), weakref.ref(loader.sampler))
loader = DataLoader(range(8), batch_size=2, sampler=DistributedSampler(range(8), 2, 0))
gc.collect()
verdict("the old ones stay in memory", any(old() is not None for old in gone))
verdict("the new one has the same order as the old one", list(loader.sampler) == first)

# %% [markdown]
# The old ones are freed. The real fault is the second line: a new sampler is at epoch 0 again.
#
# **2. "With a `Subset` for each card and the same seed, all cards see the same data."** Two ranks, disjoint halves, a
# `RandomSampler` each, both seeded with 0.


# %%
def visits(rank, epochs=2):
    half = Subset(range(12), range(rank * 6, rank * 6 + 6))
    sampler = RandomSampler(half, generator=torch.Generator().manual_seed(0))
    return [[half[place] for place in sampler] for _ in range(epochs)]


a, b = visits(0), visits(1)
verdict("the two ranks see the same samples", bool(set(a[0]) & set(b[0])))
verdict("the two ranks draw the same places in their halves", [i % 6 for i in a[0]] == [i % 6 for i in b[0]])

# %% [markdown]
# Disjoint halves stay disjoint; only the places agree.
#
# **3. "With a `Subset`, the second epoch repeats the first."**

# %%
verdict("the second epoch has the order of the first", a[0] == a[1])
verdict("the second epoch has the samples of the first", set(a[0]) == set(a[1]))

# %% [markdown]
# The order is new. What a fixed half does cost: a sample never meets those of the other half in a batch, in no epoch.
#
# **4. "Without `set_epoch`, eight cards with batch 2 work on the same 16 samples."**

# %%
batches = [list(DistributedSampler(range(64), 8, rank))[:2] for rank in range(8)]
show.shards(batches, 64)

# %% [markdown]
# Sixteen different ones in the first step (the other 48 come later). If the cards did see the *same* samples, it would
# be two and not sixteen. What repeats without `set_epoch` is the order, in the next epoch.
#
# **5. "Give the sampler the local rank."** Two nodes with two ranks each: the local ranks are 0, 1, 0, 1.

# %%
show.shards([list(DistributedSampler(range(12), num_replicas=4, rank=local)) for local in (0, 1, 0, 1)], 12)

# %% [markdown]
# Half of the data is seen twice, half of it never, without an error. The local rank is for the device; everything else
# takes the rank. On one node nobody notices.
#
# **6. "A checkpoint needs `sampler.state_dict()`."**

# %%
sampler = DistributedSampler(range(20), 2, 0, seed=7)
verdict("there is such a method", hasattr(sampler, "state_dict"))
sampler.set_epoch(3)
straight = list(sampler)
again = DistributedSampler(range(20), 2, 0, seed=7)
again.set_epoch(3)
verdict("seed, epoch and the number of samples done are enough to go on", list(again)[4:] == straight[4:])

# %% [markdown]
# **7. "Without `drop_last=True` DDP raises a ValueError: Sampler option 'drop_last' must be True."** We look for that
# message in all of torch's Python files, and train without.


# %%
def with_a_tail():
    model = DistributedDataParallel(nn.Linear(1, 1))
    sampler = DistributedSampler(range(9), drop_last=False)
    sizes = []
    for batch in DataLoader(torch.arange(9.0)[:, None], batch_size=2, sampler=sampler):
        model(batch).sum().backward()
        sizes.append(len(batch))
    return sizes


texts = (file.read_text(errors="ignore") for file in Path(torch.__file__).parent.rglob("*.py"))
verdict("torch has that message", any("drop_last' must be" in text for text in texts))
print("batch sizes by rank:", run(with_a_tail, ranks=2).results)

# %% [markdown]
# A last batch of another size is no problem, nor must the batch be divisible by the number of devices.
#
# **8. "Cut the data set with a `Subset`, so that it divides."** 13 samples, four ranks, five epochs.

# %%
cut, dropped = set(range(12)), set()
for epoch in range(5):
    samplers = [DistributedSampler(range(13), 4, rank, drop_last=True) for rank in range(4)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        dropped |= set(sampler)
print("never seen in five epochs, with the cut:      ", set(range(13)) - cut)
print("never seen in five epochs, with drop_last=True:", set(range(13)) - dropped)

# %% [markdown]
# The cut loses the same sample for ever; a sampler that drops a tail after shuffling loses another one each time.
#
# **9. "You get a wrong split if the sampler's seed is not set."**

# %%
default = inspect.signature(DistributedSampler).parameters["seed"].default
verdict(f"without an argument the seed differs from rank to rank (it is {default})", default is None)

# %% [markdown]
# **10. "The backend is gloo, so the sampler needs `shuffle=True`."** If one had to do with the other, the sampler would
# talk.


# %%
def shuffled():
    return list(DistributedSampler(range(8), shuffle=True))


r = run(shuffled, ranks=2)
verdict("the sampler sends something", len(r.messages) > 0)

# %% [markdown]
# ## Seeds
#
# **11. "Seed everything with 42 + rank at the start."** Good for dropout. But some data sets are split at random, too.


# %%
def split_after_seeding():
    torch.manual_seed(42 + dist.get_rank())
    train, test = random_split(range(100), [80, 20])
    return set(train.indices), set(test.indices)


(train_0, _), (_, test_1) = run(split_after_seeding, ranks=2).results
print(len(train_0 & test_1), "of 20 test samples of rank 1 are in the training set of rank 0")

# %% [markdown]
# The ranks train on each other's test samples, and the result looks better than it is. Build data and model with one
# seed (or give `random_split` a generator); then seed by rank what shall differ.
#
# ## Evaluation
#
# **12. "Under `torch.no_grad()` DDP still synchronises gradients."** A model with BatchNorm: one training step, then
# two forwards without gradients. We count what the two add.


# %%
def step_and_two_looks(evaluate):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4)).sum().backward()
    for _ in range(2 * evaluate):
        with torch.no_grad():
            model(torch.randn(8, 4))


without, looked = (run(step_and_two_looks, ranks=2, args=(evaluate,)) for evaluate in (0, 1))
for op in ("all_reduce", "broadcast"):
    verdict(f"two forwards without gradients add calls of {op}", calls(looked, op) > calls(without, op))

# %% [markdown]
# No gradient travels. But the first forward after a training step sends rank 0's buffers to all; so a rank that
# evaluates alone hangs, and this is why you evaluate `model.module`.
#
# **13. "Average the accuracies of the ranks."** Three ranks with 100, 100 and 1 samples, all right but the last.

# %%
right, samples = torch.tensor([100.0, 100.0, 0.0]), torch.tensor([100.0, 100.0, 1.0])
print(f"mean of ranks {(right / samples).mean():.3f}   counts {(right.sum() / samples.sum()):.3f}")

# %% [markdown]
# One sample took a third of the result away. Add up counts.
#
# ## A network that runs
#
# **14. "It trains, so the last layer is right."** A widely read template gives 1,024 outputs to a task of 10 classes.
# The loss of an untrained network tells you: it is the logarithm of the number of classes that it chooses from.

# %%
x, y = torch.randn(64, 20), torch.randint(10, (64,))
for outputs in (10, 1024):
    loss = nn.functional.cross_entropy(0.01 * nn.Linear(20, outputs)(x), y).item()
    print(f"{outputs:>4} outputs: first loss {loss:.2f}, ln({outputs}) = {math.log(outputs):.2f}")

# %% [markdown]
# **15. "DDP has NCCL's ring all-reduce built in."** We look at what it calls.


# %%
def one_step():
    model = DistributedDataParallel(nn.Linear(9, 9))
    model(torch.randn(2, 9)).sum().backward()
    return dist.get_backend()


r = run(one_step, ranks=2)
print("backend:", r.results[0], "  all-reduces that DDP asked it for:", calls(r, "all_reduce"))

# %% [markdown]
# DDP asks the process group for an all-reduce, and gloo did it. Which algorithm that is, ring or tree, is the business
# of the library below, by size and topology. DDP itself brings the buckets and the overlap.
#
# ## In three lines
#
# - A claim about who sees or sends what can be counted: let the ranks return indices, and look at `r.messages`.
# - "It runs and the loss falls" proves nothing about the split of the data, the seeds or the metric.
# - Tests with two ranks and a length that divides hide most of these mistakes: take three or four, and 13 samples.
#
# ## Which lesson has tested what
#
# | said | lesson |
# |---|---|
# | "The ring lowers the cost from O(N) to O(N-1)" | 03, 04 |
# | "N GPUs are one GPU that is N times as large"; "DDP is for models that do not fit on one" | 05 |
# | "Scaling is near-linear" | 05 |
# | "DDP updates the parameters, too"; "the API is that of one GPU" | 05 |
# | "`init_process_group` comes before `model.to(device)`" | 05 |
# | DataParallel: forward on the main card, gradients left on the cards, "model parallelism" | 05, from the source |
# | "`model.eval()` stops the synchronisation" | 05, 07 |
# | "NCCL fuses small gradients"; "one all-reduce when all gradients are there" | 06, 07 |
# | "Overlap is a knob"; "it overlaps with the next batch" | 06, 07 |
# | "Mixed precision halves the communication" | 07 |
# | "`.to(...)` after wrapping raises an error" | 07 |
# | "Accumulation saves communication", without `no_sync`; `zero_grad` in each microbatch | 07 |
# | "Comm hooks need torch 2.0"; "1-bit Adam is an option of DDP" | 07 |
# | "DistributedSampler: no overlap, no omission, boundaries are handled" | 08 |
# | "The length must be divisible"; "`drop_last=True`, or the all-reduce breaks"; 257 on eight cards | 08 |
# | "It reshuffles by itself"; "duplicates: call `set_epoch`" | 08 |
# | A sampler that the loader never gets; data made at random in each process | 08 |
# | "Validate with `shuffle=False, drop_last=False`"; "ranks disagree: look at the shuffling" | 08 |
# | "An IterableDataset instead avoids copies" | 08 |
# | "2 to 4 times the cores", or "2 times the GPUs", as `num_workers` | 08 |
