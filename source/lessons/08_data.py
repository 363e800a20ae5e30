# %% [markdown]
# # 08 · Data
#
# **Afterwards you can** say which rank sees which sample, and prove it; recognise the faults that print no error;
# evaluate exactly on any number of ranks; and train when the samples do not come out even.
#
# **Time** 40 minutes to read; the cells run in about a minute.

# %%
import os
import warnings
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from course_lib import run, show
from course_lib.launch import RunError
from course_lib.train.order import Order, epoch_order, share

# %% [markdown]
# A fault in the data hardly shows in the loss: it falls, too, when every rank sees the same samples, or some samples
# never. So look at the numbers of the samples themselves. Here the data set is `range(13)`: sample 5 is the number 5,
# and `show.shards` draws who saw what.
#
# ## The sampler that comes with torch
#
# `DistributedSampler` gives each rank its part of the indices, and the loader fetches these.
#
# **Predict:** 13 samples, four ranks, batches of two. How many samples does each rank see?


# %%
def sampled(samples, **options):
    sampler = DistributedSampler(range(samples), **options)
    loader = DataLoader(range(samples), batch_size=2, sampler=sampler)
    return [batch.tolist() for batch in loader]


show.shards(run(sampled, ranks=4, args=(13,)).results, 13)

# %% [markdown]
# Four each, 16 in all: three samples are there twice. You can read that the sampler "splits without overlap". It does
# not. So that all ranks make the same number of steps, it **pads**: it takes the first samples of its list once more.
#
# The other choice is `drop_last=True`. **Predict:** what changes?


# %%
def without_the_tail(samples):
    return sampled(samples, drop_last=True)


show.shards(run(without_the_tail, ranks=4, args=(13,)).results, 13)

# %% [markdown]
# Now one sample is left out. Neither choice ends in unequal ranks. Three claims go around
# about this: that the number of samples must be divisible by the number of ranks; that without `drop_last=True` an
# unequal last batch breaks the all-reduce; and that 257 samples on eight cards make seven shares of 32 and one of 33.
#
# **Predict** the shares of the third:

# %%
for drop_last in (False, True):
    print([len(DistributedSampler(range(257), 8, rank, drop_last=drop_last)) for rank in range(8)])

# %% [markdown]
# Equal, either way: 33 with 7 repetitions, or 32 with one sample left out. And what is all-reduced is a gradient: it
# has the shape of its parameter, whatever the size of the batch. `drop_last` of the *sampler* is about shares;
# `DataLoader(drop_last=True)` is another thing and leaves out the last, smaller batch of a share.
#
# For training, three repeated samples in a million hardly matter. For a test result they do, as you will see.
#
# ## Four faults without an error
#
# **1. The sampler is made, and the loader never gets it.** This stands in a widely read template.


# %%
def forgotten():
    sampler = DistributedSampler(range(8))
    sampler.set_epoch(0)
    loader = DataLoader(range(8), batch_size=2)
    return [batch.tolist() for batch in loader]


show.shards(run(forgotten, ranks=4).results, 8)

# %% [markdown]
# Every rank trains on everything, in the same order: all ranks compute the same gradient, and their average is that of
# one process. Four cards do the work of one, without an error.
#
# **2. `set_epoch` is forgotten.** **Predict:** does each epoch have another order, as you can read? And do ranks then
# see each other's samples?


# %%
def two_epochs(told):
    sampler, orders = DistributedSampler(range(8)), []
    for epoch in range(2):
        if told:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


r = run(lambda: (two_epochs(told=False), two_epochs(told=True)), ranks=2)
for rank, (without, called) in enumerate(r.results):
    print(f"rank {rank}   forgotten: {without}   called: {called}")

# %% [markdown]
# Without it both epochs have the same order. With it they differ, in the same way on all ranks. That is all it does. In
# either case the two ranks have no sample in common: if yours see the same samples, `set_epoch` is not the cure. (Who
# makes a new sampler for each epoch must call it, too: a new one starts at epoch 0.)
#
# **3. Each rank has a seed of its own.** "Set the seed to 42 + rank" is good advice for dropout. Here?


# %%
def own_seed(samples):
    return sampled(samples, seed=dist.get_rank())


show.shards(run(own_seed, ranks=4, args=(12,)).results, 12)

# %% [markdown]
# Each rank shuffles in another way and takes its part of that. Some samples come several times, some never. The sampler
# asks nobody: it *relies* on all ranks having the same seed (its default is 0 on all), the same length and the same
# data.
#
# **4. The data themselves differ.** Another template makes `torch.randn(1000, 10)` in each process. **Predict:** is
# sample 0 the same on both ranks?


# %%
def made_here():
    return torch.randn(1000, 10)[0, :3].tolist()


run(made_here, ranks=2).results

# %% [markdown]
# No: two data sets. Index 0 means something else on each rank, so "no overlap" means nothing. Make random data with a
# generator and a fixed seed, the same on all ranks.
#
# ## An order without a state
#
# The course's loop needs no sampler object. Who sees what at which step is a **pure function** of seed, step and number
# of ranks, in `course_lib/train/order.py`: shuffle by (seed, epoch), cut the order into global batches, deal each batch
# out like cards.

# %%
order = epoch_order(seed=0, epoch=1, samples=13)
show.shards([share(order, rank, 4) for rank in range(4)], 13)

# %% [markdown]
# Unequal shares, nothing repeated, nothing lost. And the order does not depend on the number of ranks. **Predict:** we
# look at step 2 with global batches of 6. Which samples do 1, 2 and 3 ranks see together?

# %%
plan = Order(seed=0, samples=13, global_batch=6)
for ranks in (1, 2, 3):
    step = [next(plan.keys(rank, ranks, first=2, last=2)) for rank in range(ranks)]
    print(ranks, "ranks:", [[index for _, index in keys] for keys in step])

# %% [markdown]
# The same six. So a run on four ranks can be compared, step by step, with one process; when a rank is lost, three go on
# with the samples that four would have seen; and a checkpoint needs the number of the step, nothing else.
# (`tests/train/test_order.py` tries this with random lengths and numbers of ranks.)
#
# Two more details. torch's sampler *adds* seed and epoch, so runs with neighbouring seeds are one run, shifted. And it
# has no `state_dict`, though you can read that it has:

# %%
one, other = DistributedSampler(range(8), 1, 0, seed=0), DistributedSampler(range(8), 1, 0, seed=1)
one.set_epoch(1)
print(list(one), list(other), hasattr(one, "state_dict"))

# %% [markdown]
# ## An exact test result
#
# A network is right for 10 of 13 test samples: accuracy 0.7692. Let it be wrong for the first three, and let four ranks
# share the work.
#
# **Predict:** what do they find with `DistributedSampler(shuffle=False)`?

# %%
RIGHT = torch.tensor([0] * 3 + [1] * 10)


def tested(padded):
    sampler = DistributedSampler(RIGHT, shuffle=False)
    mine = list(sampler) if padded else share(np.arange(13), dist.get_rank(), dist.get_world_size())
    counted = torch.tensor([RIGHT[mine].sum(), len(mine)])
    alone = round((counted[0] / counted[1]).item(), 4)
    dist.all_reduce(counted)
    return alone, round((counted[0] / counted[1]).item(), 4)


for rank, (padded, exact) in enumerate(run(lambda: (tested(True), tested(False)), ranks=4).results):
    print(f"rank {rank}   padded: {padded}   exact: {exact}")

# %% [markdown]
# Each pair is (this rank alone, all together). Padded, the three wrong ones count twice: 0.625. "Use `shuffle=False,
# drop_last=False` for validation" is not enough. And each rank alone says something else: a widely read answer to "my
# ranks report different accuracies" is to look at the shuffling, but that is simply what a share is. Three rules:
#
# - shares without padding; they may be unequal, since nobody waits for anybody between the batches;
# - add up **counts** over the ranks, then divide once. A mean of means weights ranks, not samples;
# - call `model.module`, not the wrapper: its forward may broadcast buffers, and a rank with fewer batches is not there.
#
# The last rule has another half. BatchNorm's statistics are buffers, which each rank updates with its own batches.


# %%
def statistics():
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    for _ in range(3):
        model(torch.randn(8, 1) + dist.get_rank()).sum().backward()
    return round(model.module[0].running_mean.item(), 3)


run(statistics, ranks=3).results

# %% [markdown]
# Three ranks, three networks. DDP gives rank 0's buffers to all at its *next* forward. So before an evaluation
# do it yourself; `evaluate` in `course_lib/train/evaluate.py` does, and its result on 1 to 4 ranks is that of one
# process, for 1 to 13 samples (`tests/train/test_evaluate.py`). Writing it is your exercise.
#
# ## Streams and workers
#
# An `IterableDataset` has no indices, so no sampler can split it. **Predict:** two ranks with two workers each read
# this stream of 8 samples. How often is each sample seen?


# %%
class Stream(IterableDataset):
    def __init__(self, split):
        self.split, self.rank, self.ranks = split, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        worker = get_worker_info()
        part = (self.rank * worker.num_workers + worker.id, None, self.ranks * worker.num_workers)
        return islice(range(8), *part) if self.split else iter(range(8))


def streamed(split):
    return [batch.tolist() for batch in DataLoader(Stream(split), batch_size=2, num_workers=2)]


both = run(lambda: (streamed(split=False), streamed(split=True)), ranks=2).results
show.shards([whole for whole, _ in both], 8)

# %% [markdown]
# Four times: each worker of each rank has its own copy of the data set and reads all of it. Cut by rank *and* worker:

# %%
show.shards([split for _, split in both], 8)

# %% [markdown]
# **Random numbers in workers.** You may have read that NumPy gives the same numbers in all workers. That was so; in
# torch 2.14 each worker seeds `random`, NumPy and torch. But from what? **Predict:** both ranks called
# `torch.manual_seed(0)`. Which of these eight numbers are equal?


# %%
class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return round(np.random.rand(), 3)


def drawn():
    torch.manual_seed(0)
    loader = DataLoader(Augmented(), batch_size=2, num_workers=2, collate_fn=list)
    return [number for batch in loader for number in batch]


run(drawn, ranks=2).results

# %% [markdown]
# The workers of a rank differ, the ranks do not: a worker's seed is drawn from the rank's generator, and these were
# equal. So both ranks flip and crop in the same places of a batch. Seeds that differ by rank cure that, but then the
# numbers depend on the number of ranks and workers. The course seeds each *sample*, by (seed, epoch, index): any
# number of workers, the same picture (`seed_sample` in `course_lib/train/randomness.py`).
#
# **How many workers?** "2 to 4 times the CPU cores" can be read, and "2 times the GPUs". `num_workers` counts for *each
# rank*. torch warns, but a rank knows only of its own. **Predict:** is there a warning on this machine, if eight ranks
# ask for as many workers as there are cores?

# %%
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
for workers in (cores, cores + 1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader(range(8), num_workers=workers)
    what = "a warning" if caught else "silence"
    print(f"{cores} cores, {workers} workers a rank, {8 * workers} on eight ranks: {what}")

# %% [markdown]
# Silence for eight times too many. Start with cores / ranks, and let a measurement decide: the time that a step waits
# for its data (lesson 11).
#
# ## When ranks have unequal numbers of batches
#
# Rank 2 has one sample, ranks 0 and 1 have two, and each backward is an all-reduce.
#
# **Predict:** what happens in the second step?

# %%
DATA = torch.arange(1.0, 6.0, dtype=torch.float64).reshape(5, 1)


def one_each(**join):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    nn.init.ones_(model.module.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model], enable=bool(join), **join):
        for x in share(DATA, dist.get_rank(), dist.get_world_size()):
            model(x).square().sum().backward()
            sgd.step()
            sgd.zero_grad()
    return model.module.weight.item()


try:
    run(one_each, ranks=3, timeout=20)
except RunError as error:
    print(error)

# %% [markdown]
# A hang: rank 2 has left, and the others wait for it. (They wait in a broadcast: once, after its first backward, DDP
# fills its buckets anew and rank 0 says how, as you saw in lesson 07.)
#
# **`Join`** is torch's answer: a rank that is through takes part in the collectives of the others, with zeros. What
# does it cost, and is the result right? One process takes samples 1, 2, 3 in one step and 4, 5 in the next.


# %%
def joined(by_all):
    return one_each(divide_by_initial_world_size=by_all)


def exact():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    for batch in DATA.split(3):
        (grad,) = torch.autograd.grad(model(batch).square().mean(), model.weight)
        model.weight.data -= 0.01 * grad
    return model.weight.item()


r = run(lambda: (joined(by_all=True), joined(by_all=False)), ranks=3)
sums = sum(m.op == "all_reduce" and m.rank == 0 for m in r.messages) // 2
print(f"Join          {r.results[0][0]:.6f}   all-reduces of rank 0, in each: {sums}")
print(f"Join, by two  {r.results[0][1]:.6f}")
print(f"one process   {exact():.6f}")

# %% [markdown]
# By default the sum is still divided by all three ranks, so the last two samples count for 2/3. With
# `divide_by_initial_world_size=False` it is right here, where the ranks that are left have equal batches. Two gradients
# were needed; the other all-reduces ask who is still there. And Join knows the model only: on rank 2 `sgd.step()` was
# called once, so the momentum of an optimizer, if it had one, would have missed a step there.
#
# **Equal counts by construction** need nothing of the kind. Everybody makes the steps of the *global* plan; a rank
# without a sample contributes zeros; the loss is a sum, divided by the global count.


# %%
def planned():
    rank, size, plan = dist.get_rank(), dist.get_world_size(), Order(seed=0, samples=5, global_batch=3)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    nn.init.ones_(model.module.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, keys in enumerate(plan.keys(rank, size, 1, plan.per_epoch), 1):
        x = DATA[[index for _, index in keys]]  # perhaps of length 0
        (model(x).square().sum() * size / plan.count(step)).backward()
        sgd.step()
        sgd.zero_grad()
    return round(model.module.weight.item(), 12)


for ranks in (1, 2, 3):
    r = run(planned, ranks=ranks)
    print(ranks, "ranks:", r.results, " all-reduces:", sum(m.op == "all_reduce" for m in r.messages) // ranks)

# %% [markdown]
# The same weight on any number of ranks, with two all-reduces for two steps. (It is not the one above, since `Order`
# shuffles: other samples meet in the first step. One rank *is* one process in this order.) DDP divides by the number
# of ranks, so the factor size / count turns its mean over ranks into the mean over samples, for uneven batches as
# well. (Not every layer takes an empty batch, so the course's loop gives such a rank one made-up sample, in evaluation
# mode, and multiplies its loss by zero: `take_part` in `course_lib/train/loop.py`.)
#
# ## In three lines
#
# - Look at the indices: sampler passed, one seed, `set_epoch`, split by rank and worker.
# - Let the order be a pure function of seed, step and world size; then restart and comparison are free.
# - Test results: unpadded shares, rank 0's buffers, `model.module`, counts added up once.
#
# ## On A100s
#
# With AMP an A100 trains ResNet-50 on 2,470 images a second, and eight of them on 16,621 (NVIDIA DeepLearningExamples,
# DGX A100 80GB, 21.03). So many JPEGs must be decoded and cropped in each second, by the CPU cores of one node. Measure
# how many one core of yours can do (lesson 11): 16,621 divided by that is the number of cores that eight GPUs need, and
# this decides `num_workers`, not a rule of thumb.
#
# ## Exercise
#
# [Exercise 08: data](../exercises/08_data/08_data.ipynb) Write `shard` and `evaluate`, so that they are right for any
# number of samples and ranks. About 35 minutes.
