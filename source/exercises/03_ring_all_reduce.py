# %% [markdown]
# # Exercise 03: the ring all-reduce
#
# **Difficulty** hard · **Time** 40 minutes · **You write** about 15 lines · **Points** 10
#
# Every rank has a tensor of gradients. Afterwards every rank has the sum over all ranks, or the mean, in that same
# tensor.
#
# **Goal.** `ring_all_reduce(tensor, op="sum")` works in place, with these numbers for N ranks and a tensor of M bytes:
#
# | | |
# |---|---|
# | steps | 2(N-1): N-1 of reduce-scatter, then N-1 of all-gather |
# | bytes | each rank sends 2(N-1)/N·M, so 1.5 M with four ranks |
# | peers | each rank sends to its right neighbour and receives from its left neighbour |
# | bits | all ranks end with the same bits |
# | inputs | any length (0, 1, fewer than N, not divisible by N), float32, float64, bfloat16, int64, any N |
# | `op` | `"sum"`, or `"mean"` (of floats): the sum divided by N |
#
# **The plan.** Cut the tensor into N chunks. In step s = 0, 1, … N-2
#
# 1. *reduce-scatter*: rank r sends chunk (r - s) % N to the right, and **adds** what comes from the left to its chunk
#    (r - s - 1) % N. At the end it has the finished chunk (r + 1) % N;
# 2. *all-gather*: rank r sends chunk (r + 1 - s) % N, and what comes from the left **replaces** its chunk (r - s) % N.
#
# Only `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv` are allowed. `torch.tensor_split(tensor, N)` gives N
# views of the tensor, and writing to a view writes to the tensor.

# %%
import torch
import torch.distributed as dist

from course_lib import check, run, show


# %% solution="ring_all_reduce"
def ring_all_reduce(tensor, op="sum"):
    """Sum or mean over all ranks, in place. tensor: one-dimensional, of equal length and dtype on all ranks."""
    # about 15 lines: the neighbours, the chunks, two loops of N - 1 steps, the division
    ### BEGIN SOLUTION
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(tensor, size)

    for step in range(size - 1):
        mine = chunks[(rank - step - 1) % size]
        arrived = torch.empty_like(mine)
        sending = dist.isend(chunks[(rank - step) % size], right)
        dist.irecv(arrived, left).wait()
        sending.wait()
        mine += arrived

    if op == "mean":
        chunks[(rank + 1) % size].div_(size)

    for step in range(size - 1):
        sending = dist.isend(chunks[(rank + 1 - step) % size], right)
        dist.irecv(chunks[(rank - step) % size], left).wait()
        sending.wait()
    ### END SOLUTION


# %% [markdown]
# ## See it run
#
# `show.tracked` calls your function with numbers that remember which ranks they come from, and `show.ring` draws that
# run: a row for each rank, a box for each chunk, a stripe for each rank in the sum. Step through it with the arrow
# keys. After step 3 each rank must have one finished chunk, after step 6 all four. (If it stops in a deadlock, the
# lines below say where each rank waits.)

# %% tags=["show"]
r = run(show.tracked(ring_all_reduce), ranks=4)
show.ring(r)

# %% [markdown]
# ## Check
#
# The check runs your function on 1, 2, 3 and 4 ranks with fresh numbers. It looks at the values, at the bits, at who
# sent how many bytes to whom, and at whether every handle was waited for before its tensor was touched. If something
# is wrong it says on which rank, in which chunk, and why.

# %% graded="check_ring_all_reduce" points=10
check.ring_all_reduce(ring_all_reduce)

# %% [markdown]
# All ticks? Then look at the messages of a checked run on four ranks: in each of six steps each rank sends a chunk to
# the right and gets one from the left.

# %% tags=["show"]
show.messages(check.ring_all_reduce(ring_all_reduce).run)
