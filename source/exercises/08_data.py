# %% [markdown]
# # Exercise 08: data
#
# **Difficulty** medium · **Time** 35 minutes · **You write** about 20 lines · **Points** 11
#
# Two functions that every training script needs and many get wrong without noticing.
#
# **Goal 1.** `shard(seed, epoch, samples, rank, world_size)` returns the indices of the samples that a rank sees in an
# epoch, in order.
#
# | | |
# |---|---|
# | once | over all ranks each of 0, 1, … samples - 1 is there exactly once: none repeated, none left out |
# | even | sizes differ by one at most; with fewer samples than ranks some ranks get none |
# | dealt | sample i of the shuffled order goes to rank i % world_size, as cards are dealt |
# | one order | the shuffled order depends on seed and epoch only: with 1 rank and with 7 it is the same |
# | fresh | another shuffle of all samples in each epoch and for each seed; epoch 1 of seed 0 is not epoch 0 of seed 1 |
# | pure | the same arguments give the same answer in each process, without messages, whatever was asked before |
# | quiet | the global generators of `random`, NumPy and torch stay as they were |

# %%
import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib import check, run, show


# %% solution="shard"
def shard(seed, epoch, samples, rank, world_size):
    """Indices of the samples of this rank in this epoch: a list, an array or a tensor of whole numbers."""
    # about 2 lines; a generator of your own can be made from two numbers: np.random.default_rng([1, 2])
    ### BEGIN SOLUTION
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    return order[rank::world_size]
    ### END SOLUTION


# %% [markdown]
# ## See it run
#
# Four real ranks deal 18 samples, in two epochs. Each row is a rank. Look for each number: is it there once, and only
# once? Ranks 0 and 1 must have one sample more than the others.


# %% tags=["show"]
def deal(epoch):
    return [int(index) for index in shard(0, epoch, 18, dist.get_rank(), dist.get_world_size())]


show.shards(run(deal, ranks=4, args=(0,)).results, 18)

# %% tags=["show"]
show.shards(run(deal, ranks=4, args=(1,)).results, 18)

# %% graded="check_shard" points=5
check.shard(shard)

# %% [markdown]
# **Goal 2.** `evaluate(model, images, labels, batch_size)` returns `(accuracy, loss)` on every rank, exactly as one
# process would compute them. All ranks have the whole test set; they share the work.
#
# | | |
# |---|---|
# | `model` | a `DistributedDataParallel` in training mode; `model.module` has BatchNorm and dropout |
# | accuracy, loss | right answers / samples, and the mean cross-entropy, over *all* samples: floats, equal to 1e-10 |
# | work | each sample goes through `model.module` once, on one rank, in batches of at most `batch_size` |
# | any number | 13 samples on 3 ranks, the last batch smaller; 2 samples on 3 ranks, so that one has none |
# | buffers | the BatchNorm statistics are those of rank 0 |
# | messages | the buffers, and sums at the end: as many calls and bytes for 48 samples as for 13; no barrier |
# | afterwards | no graph was recorded; the model, with all its layers, is in training mode again, gradients are on |


# %% solution="evaluate"
def evaluate(model, images, labels, batch_size):
    """(accuracy, loss) over all samples. images: (n, ...); labels: (n,) int64; both whole on each rank."""
    # about 15 lines: buffers, mode, my share in batches, sums, one all-reduce
    ### BEGIN SOLUTION
    module = model.module
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
    counted = torch.zeros(3, dtype=torch.float64)  # right, samples, sum of losses
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    module.eval()
    with torch.no_grad():
        for x, y in zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True):
            scores = module(x)
            counted[0] += (scores.argmax(1) == y).sum()
            counted[1] += len(y)
            counted[2] += F.cross_entropy(scores, y, reduction="sum")
    module.train()
    dist.all_reduce(counted)
    right, samples, loss = counted.tolist()
    return right / samples, loss / samples
    ### END SOLUTION


# %% graded="check_evaluate" points=6
check.evaluate(evaluate)

# %% [markdown]
# All ticks? Then here is what your ranks said to each other in the first case of the check, with 13 samples. It begins
# with DDP being built. Yours are the last calls: the buffers of rank 0, and the sums.

# %% tags=["show"]
show.messages(check.evaluate(evaluate).run)
