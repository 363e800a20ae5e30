# %% [markdown]
# # Exercise 02: around the circle
#
# **Difficulty** easy · **Time** 15 minutes · **You write** about 8 lines · **Points** 5
#
# The ranks stand in a circle. Each one passes what it has to its **right neighbour**, rank + 1, and gets what its
# **left neighbour**, rank - 1, had. After the last rank comes rank 0 again. Every ring algorithm is made of this move.
#
# **Goal.** `shift(tensor)` returns the tensor of the left neighbour, on any number of ranks.
#
# | | |
# |---|---|
# | result | a tensor with the shape and dtype of `tensor`; all ranks have the same shape and dtype |
# | messages | one send a rank, to the right, of exactly `tensor.numel() * tensor.element_size()` bytes |
# | input | `tensor` is the same after the call as before |
# | one rank | it is its own neighbour: it returns its own tensor, and sends nothing |
# | no deadlock | from 0 to 100,000 elements, also when one rank comes late |
#
# Use `send`, `recv`, `isend`, `irecv` or `batch_isend_irecv` of `torch.distributed`. A handle that you get is to be
# waited for; until then its tensor belongs to the message, so do not touch it.

# %%
import torch
import torch.distributed as dist

from course_lib import check, run, show


# %% solution="shift"
def shift(tensor):
    """The tensor of rank - 1. tensor: contiguous, any shape and dtype, equal on all ranks."""
    # about 8 lines: rank and size, the two neighbours, a buffer, send and receive, wait
    ### BEGIN SOLUTION
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % size)
    dist.irecv(received, (rank - 1) % size).wait()
    sending.wait()
    return received
    ### END SOLUTION


# %% [markdown]
# ## See it run
#
# Four ranks; rank r has three numbers 10·r. What must rank 0 get?


# %% tags=["show"]
def numbers():
    return shift(torch.full((3,), 10 * dist.get_rank())).tolist()


r = run(numbers, ranks=4)
r.results

# %% [markdown]
# The picture of that run. You should see four arrows, one from each rank to the next, and one of them all the way
# back.

# %% tags=["show"]
show.messages(r)

# %% [markdown]
# ## Check
#
# The check runs your function on 1, 2, 3 and 4 ranks, with numbers, shapes and dtypes that it makes up afresh. In
# one of its cases a rank comes late, so that a race shows.

# %% graded="check_shift" points=5
check.messages(shift)
