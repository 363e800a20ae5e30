# %% [markdown]
# # 02 · Messages
#
# **Afterwards you can** send a tensor from one rank to another; say why a circle in which everybody sends first
# hangs, and read what `run` says about it; and send and receive at the same time with `isend` and `irecv`.
#
# **Time** 25 minutes to read; the cells run in less than a minute.

# %%
import time

import torch
import torch.distributed as dist

from course_lib import run, show
from course_lib.launch import RunError

# %% [markdown]
# ## One message
#
# `dist.send(tensor, to)` on one rank needs `dist.recv(tensor, source)` on the other. The receiver brings the
# memory: `recv` overwrites a tensor that is there already. Nothing about its shape travels along, so both sides
# must know it beforehand.


# %%
def hello():
    tensor = torch.full((1000,), 7.0 if dist.get_rank() == 0 else 0.0)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return tensor[:3].tolist()


r = run(hello, ranks=2)
print(r.results)
show.messages(r)

# %% [markdown]
# Rank 1 has lost its zeros and has rank 0's numbers, 4,000 bytes of them (1,000 elements of four bytes each). Each
# rank is a lane, time runs to the right. Click on the slider and press →: the caption names the line of your code.
#
# **Predict:** rank 1 sleeps for half a second before it receives. When does `send` return on rank 0: at once, since
# the bytes are on their way, or after half a second? Does it matter whether they are 4 bytes or 4 MB?


# %%
def send_to_a_sleeper(elements):
    tensor = torch.zeros(elements)
    if dist.get_rank() == 1:
        time.sleep(0.5)
        return dist.recv(tensor, 0)
    began = time.monotonic()
    dist.send(tensor, 1)
    return time.monotonic() - began


for elements in (1, 1_000_000):
    print(f"{4 * elements:>9,} bytes: {run(send_to_a_sleeper, ranks=2, args=(elements,)).results[0]:.2f} s in send")

# %% [markdown]
# Half a second, for four bytes too. On gloo `send` does not return before the receiver has called `recv`; then it
# hands the data to the operating system and is done. It is a meeting, not a letter box.
#
# ## Everybody sends first
#
# Now four ranks in a circle. Each passes its number to its right neighbour and then receives from its left one. It
# reads well, and it is how people begin.
#
# **Predict:** what happens?


# %%
def send_first():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.tensor([float(rank)]), torch.zeros(1)
    dist.send(mine, (rank + 1) % size)
    dist.recv(theirs, (rank - 1) % size)
    return theirs.item()


try:
    run(send_first, ranks=4)
except RunError as error:
    hang = error
    print(error)

# %% [markdown]
# A **deadlock**: rank 0 waits for rank 1 to receive, but rank 1 waits for rank 2, and so on around the circle to
# rank 0. Nobody is slow; they would wait for ever. `run` looked at what each rank was waiting for, found the
# circle, and ended it. Started by plain `torchrun` the same program prints nothing, until gloo gives up after 30
# minutes (its default).
#
# A failed run can be drawn, too. What would you look for in this picture?

# %%
show.messages(hang)

# %% [markdown]
# Four sends that never end, and not one receive.
#
# **"It works with small messages."** You will hear that, and it can be true elsewhere: the MPI standard lets
# `MPI_Send` copy a message away and return before anybody receives. It does not promise it, and [programs must not
# rely on it](https://netlib.org/utk/mpi-review/node55.html): they work with 64 bytes and hang with a megabyte, or
# on the next machine. On gloo you have just seen it hang with four bytes.
#
# ## First cure: break the circle
#
# It is enough that *one* rank does it the other way round.
#
# **Predict:** rank 0 sends first, all others receive first. Which message travels when?


# %%
def one_begins(elements=1_000_000):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.full((elements,), float(rank)), torch.zeros(elements)
    for call in ("send", "recv") if rank == 0 else ("recv", "send"):
        if call == "send":
            dist.send(mine, (rank + 1) % size)
        else:
            dist.recv(theirs, (rank - 1) % size)
    return theirs[0].item()


r = run(one_begins, ranks=4)
print(r.results)
show.messages(r)

# %% [markdown]
# It is right, and it is a staircase: one message at a time, while three ranks watch (the dashed parts). With 8
# ranks it takes 8 messages' time. Had the even ranks sent first and the odd ones received first, it would be two
# rounds instead of four, still twice what the wires could do.
#
# ## Second cure: do not wait yet
#
# `isend` and `irecv` (*i* for immediate) only *begin*. They return a handle at once, and `handle.wait()` returns
# when the transfer is done. So a rank can begin to send, begin to receive, and then wait for both.
#
# **Predict** the picture.


# %%
def all_at_once(elements=1_000_000):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.full((elements,), float(rank)), torch.zeros(elements)
    sending = dist.isend(mine, (rank + 1) % size)
    arriving = dist.irecv(theirs, (rank - 1) % size)
    arriving.wait()
    sending.wait()
    return theirs[0].item()


r = run(all_at_once, ranks=4)
print(r.results)
show.messages(r)

# %% [markdown]
# All four messages are under way together. (With four ranks on two cores the processors still share the copying; on
# four machines it would take the time of one message.) The order of the two calls does not matter any more: neither
# of them waits.
#
# ## What `wait` is for
#
# Between `isend` and `wait` the tensor belongs to the transfer. **Predict:** rank 0 begins to send ones, writes -7
# into the tensor before it waits, and rank 1 receives a little later. What does rank 1 get?


# %%
def write_too_early():
    if dist.get_rank() == 0:
        tensor = torch.ones(3)
        sending = dist.isend(tensor, 1)
        tensor.fill_(-7)  # before the wait
        return sending.wait()
    time.sleep(0.2)
    tensor = torch.zeros(3)
    dist.recv(tensor, 0)
    return tensor.tolist()


run(write_too_early, ranks=2).results[1]

# %% [markdown]
# The -7: `isend` makes no copy. Without the sleep it might have been the ones, or some of each: that is what makes
# such mistakes hard to find. On the other side it is the same: until `irecv(...).wait()` has returned, the old
# numbers stand in the tensor.
#
# **Predict:** and if rank 0 throws the handle away, since the message is so small?


# %%
def no_handle():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1), 1)  # nobody keeps what it returns
    else:
        time.sleep(0.2)
        dist.recv(torch.zeros(1), 0)


try:
    run(no_handle, ranks=2)
except RunError as error:
    print(error)

# %% [markdown]
# With the handle gone, gloo drops the message. So: keep every handle, and wait for every one.
#
# ## Which receive gets which message?
#
# Between two ranks messages arrive in the order in which they were sent. A `tag`, a number on both calls, makes
# separate queues. What the bytes *mean* is not sent.
#
# **Predict:** rank 0 sends the two float32 numbers 1 and 3, which is eight bytes. Rank 1 receives them into one
# float64 number, which has eight bytes as well. Error, 1, 3, or something else?


# %%
def two_into_one():
    if dist.get_rank() == 0:
        return dist.send(torch.tensor([1.0, 3.0]), 1)
    tensor = torch.zeros(1, dtype=torch.float64)
    dist.recv(tensor, 0)
    return tensor.item()


run(two_into_one, ranks=2).results[1]

# %% [markdown]
# Neither 1 nor 3, and no error: the bits of two short numbers, read as one long one. If a result is nonsense of the
# right size, compare the dtypes on both sides. (A receiver with *too little* room is noticed: gloo ends the
# process.)
#
# ## A pair of calls as one
#
# `dist.batch_isend_irecv` takes a list of sends and receives and begins all of them. On gloo that is only another
# way to write it; on GPUs you will need it, see below.


# %%
def as_a_batch():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.tensor([float(rank)]), torch.zeros(1)
    to_right = dist.P2POp(dist.isend, mine, (rank + 1) % size)
    from_left = dist.P2POp(dist.irecv, theirs, (rank - 1) % size)
    for handle in dist.batch_isend_irecv([to_right, from_left]):
        handle.wait()
    return theirs.item()


run(as_a_batch, ranks=4).results

# %% [markdown]
# ## In three lines
#
# - `send` and `recv` are a meeting: on gloo each waits for the other, however small the message.
# - If all ranks of a circle send first, all wait for ever; `isend` and `irecv` begin without waiting.
# - Until `wait()` has returned, do not touch the tensor, and do not lose the handle.
#
# ## On A100s
#
# NCCL has `send` and `recv` too, and they are work for the GPU: the Python call puts them into a queue and returns,
# while the *GPU* waits there for its peer. A send and a receive that need each other must be begun as one group
# ([NCCL guide](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html)); that is what
# `batch_isend_irecv` does. A hang then looks different, a GPU that is busy and gets nothing done, but it is the
# same circle. Between two A100s of one node with NVLink, [one published
# test](https://github.com/NVIDIA/nccl-tests/issues/149) saw 430 to 520 GB/s, both directions together.
#
# ## Exercise
#
# [Exercise 02: around the circle](../exercises/02_messages/02_messages.ipynb) Pass a tensor to the right neighbour,
# with any number of ranks, without a deadlock. About 15 minutes.
