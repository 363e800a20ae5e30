# %% [markdown]
# # 03 · Ring all-reduce
#
# **Afterwards you can** write the ring all-reduce for any length, dtype and number of ranks; say how many bytes
# each rank sends and why every rank ends with the same bits; and tell a ring from what only looks like one.
#
# **Time** 40 minutes to read; the cells run in about a minute.

# %%
import torch
import torch.distributed as dist

from course_lib import run, show
from course_lib.launch import RunError

# %% [markdown]
# ## The job
#
# Data-parallel training needs one thing in each step: every rank has a tensor of gradients, and every rank must get
# the *sum* over all ranks. This is an **all-reduce**. The tensor has M bytes (for ResNet-50 about 100 MB), there
# are N ranks, and it happens thousands of times.
#
# The obvious way: all send to rank 0, which adds and sends the sum back.
#
# **Predict:** with four ranks, how many times M does rank 0 send, and how many times does rank 3?


# %%
def by_the_root(tensor):
    others, arrived = range(1, dist.get_world_size()), torch.empty_like(tensor)
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for other in others:
        dist.recv(arrived, other)
        tensor += arrived
    for other in others:
        dist.send(tensor, other)


# %%
def sent(r, nbytes):
    """For each rank: how many times `nbytes` it has sent."""
    sends = [m for m in r.messages if m.op in ("send", "isend")]
    return [round(sum(m.nbytes for m in sends if m.rank == rank) / nbytes, 3) for rank in range(r.ranks)]


def million(all_reduce):
    tensor = torch.ones(1_000_000)
    all_reduce(tensor)
    return tensor[-1].item()


r = run(million, ranks=4, args=(by_the_root,))
print("the sum:", r.results, "  sent, times M:", sent(r, 4_000_000))

# %% [markdown]
# Three times M, against once. All goes through the wire of rank 0: (N-1)·M out and as much in, and with 100 ranks
# it is 99·M, while 99 wires are idle most of the time.
#
# ## The idea
#
# Let *every* rank be the root, for an N-th of the tensor. Cut it into N **chunks** and place the ranks on a ring.
# Each rank talks to two others only: it sends to its **right neighbour**, rank + 1, and receives from its **left
# neighbour**, rank - 1.
#
# 1. **reduce-scatter**, N-1 **steps**: each rank passes a chunk to the right, and *adds* the chunk that comes from
#    the left to its own. A partial sum wanders around the ring and picks up one rank at each step. At the end each
#    rank has one finished chunk.
# 2. **all-gather**, N-1 steps: the finished chunks wander around once more; now what arrives *replaces* what was
#    there.
#
# Which chunk, when? In step s of phase 1 rank r sends chunk r-s and adds chunk r-s-1: what it has just added is
# what it sends next. So it ends with chunk r+1 finished, and in step s of phase 2 it sends chunk r+1-s and receives
# r-s. (All modulo N, and s counts from 0.)


# %%
def pass_on(out, right, into, left):
    sending = dist.isend(out, right)
    dist.irecv(into, left).wait()
    sending.wait()


def ring_all_reduce(tensor):
    """The sum over all ranks, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(tensor, size)  # lengths differ by one at most
    arrived = torch.empty_like(chunks[0])  # the first is never shorter than another

    for step in range(size - 1):  # reduce-scatter
        mine = chunks[(rank - step - 1) % size]
        pass_on(chunks[(rank - step) % size], right, arrived[: len(mine)], left)
        mine += arrived[: len(mine)]

    for step in range(size - 1):  # all-gather
        pass_on(chunks[(rank + 1 - step) % size], right, chunks[(rank - step) % size], left)


# %% [markdown]
# To see what it does, we let it add numbers that remember where they come from: `show.tracked` gives rank r the
# number 8**r in every element, so that each sum tells which ranks are in it.
#
# **Predict:** after two steps, which ranks are summed in chunk 0 on rank 2?

# %%
r = run(show.tracked(ring_all_reduce), ranks=4)
show.ring(r)

# %% [markdown]
# Each row is a rank, each box a chunk, and the stripes in it are the ranks that are in the sum. Press → and follow
# *one* colour, or one chunk: chunk 0 starts on rank 0, goes to rank 1, then rank 2 (ranks 0, 1 and 2: your
# prediction), and is finished on rank 3 after step 3. Look at how nobody is ever idle: in each of the 2(N-1) steps
# each rank sends a chunk and receives a chunk.
#
# ## Any length, any dtype, any number of ranks
#
# Nothing above asked whether N divides the length. `tensor_split` makes chunks of 3, 3, 2 and 2 from ten elements,
# and empty ones if there are fewer elements than ranks. **Predict:** which of these fails?


# %%
def same_as_torch(tensor):
    ours, theirs = tensor.clone(), tensor.clone()
    ring_all_reduce(ours)
    dist.all_reduce(theirs)
    return torch.equal(ours, theirs)


def all_cases():
    numbers = torch.arange(10) + dist.get_rank()
    cases = [numbers[:length].to(dtype) for length in (0, 1, 3, 10) for dtype in (torch.float32, torch.int64)]
    return f"{sum(map(same_as_torch, cases))} of {len(cases)} equal"


for ranks in (1, 3, 5):
    print(ranks, "ranks:", run(all_cases, ranks=ranks).results)

# %% [markdown]
# None. One rank needs no special case either: its loops run zero times. Popular listings lose this by cutting with
# `torch.chunk`, which makes 2, 2 and 1 of five elements *and no fourth chunk*, or by giving all buffers the size of
# rank 0's chunk.
#
# ## How many bytes?
#
# **Predict** how many times M each rank sends: with 2, 3 and 4 ranks. What would it be with 1,000?

# %%
print("ranks  sent by each rank, times M                 2(N-1)/N")
for ranks in (2, 3, 4):
    r = run(million, ranks=ranks, args=(ring_all_reduce,))
    print(f"{ranks:>5}  {sent(r, 4_000_000)!s:<42} {2 * (ranks - 1) / ranks:.3f}")

# %% [markdown]
# In 2(N-1) steps each rank sends one N-th of M, so **2(N-1)/N · M** in all, and never as much as 2M, with 1,000
# ranks either. (Patarasuk and Yuan, 2009, prove that no algorithm needs fewer.) Every wire carries the same load.
#
# **"The ring lowers the complexity from O(N) to O(N-1)."** You can read this, but O(N) and O(N-1) are the same
# thing. What the ring lowers are the bytes of the busiest rank: from (N-1)·M at the root to less than 2M. What it
# does *not* lower is the number of steps one after the other, 2(N-1): with many ranks and few bytes it is slow, and
# other algorithms win. Lesson 04 measures where.
#
# ## Every rank has the same bits
#
# With floating-point numbers the order of a sum matters:

# %%
(0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)

# %% [markdown]
# In the ring every chunk is summed *once*, along one path around the ring, and then copied. So all ranks get the
# same bits, whatever rounding did. Training relies on this: ranks whose weights differ in one bit drift apart, and
# nobody tells you.
#
# Here are two all-reduces that pass on the *whole* tensor around the ring. The first is, in other words, what the
# section "Our Own Ring-Allreduce" of a [PyTorch
# tutorial](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) shows (it says itself that the chunks
# are missing). The second takes as many steps as the real ring; it is published, too.


# %%
def pass_everything(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    going, coming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(size - 1):
        pass_on(going, (rank + 1) % size, coming, (rank - 1) % size)
        tensor += coming
        going, coming = coming, going


def two_phases_of_everything(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    pass_everything(tensor)
    coming = torch.empty_like(tensor)
    for _ in range(size - 1):
        pass_on(tensor, (rank + 1) % size, coming, (rank - 1) % size)
        tensor.copy_(coming)


# %% [markdown]
# **Predict** for 2 and for 4 ranks: how many times M do they send? In how many of 100,000 elements does some rank
# have other bits than rank 0?


# %%
def examine(all_reduce):
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(100_000)
    all_reduce(tensor)
    ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tensor)
    other_bits = torch.stack([one != ranks[0] for one in ranks]).any(0).sum().item()
    return other_bits, all(torch.allclose(one, ranks[0], atol=1e-5) for one in ranks)


for ranks in (2, 4):
    for all_reduce in (pass_everything, two_phases_of_everything, ring_all_reduce):
        r = run(examine, ranks=ranks, args=(all_reduce,))
        (bits, close), times = r.results[0], max(sent(r, 400_000))
        print(f"{ranks} ranks  {all_reduce.__name__:<25} {times:.1f} M  other bits: {bits:>6,}  allclose: {close}")

# %% [markdown]
# With **two ranks** nobody's bits differ, since a + b equals b + a, and the first one even sends what the ring
# sends. With four ranks they send 3 and 6 times M where the ring sends 1.5, and in two thirds of the elements the
# ranks do not agree, because each began the sum with its own number. `allclose` is content with all three. So
# whoever checks an all-reduce counts bytes and compares bits, with three ranks or more. The check of the exercise
# does.
#
# ## A popular listing, run
#
# Some pages show a ring that nobody can have run. Here is one of them in our words, with two of its mistakes.
#
# **Predict** the first: where will it stop?


# %%
def popular(tensor, send=dist.send):
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = list(tensor.chunk(size))
    handles = []
    for step in range(size - 1):
        into = chunks[(rank + step - 1) % size]
        arrived = torch.empty_like(into)
        handles.append(send(chunks[(rank + step) % size], right))
        dist.recv(arrived, left)
        into += arrived
    for step in range(size - 1):
        handles.append(send(chunks[(rank + step) % size], right))
        dist.recv(chunks[(rank + step - 1) % size], left)
    [handle.wait() for handle in handles if handle]


try:
    run(popular, ranks=4, args=(torch.ones(12),))
except RunError as error:
    print(error)

# %% [markdown]
# Everybody sends first: lesson 02. Let `isend` take the place of `send`, and it ends without an error.
#
# **Predict** with your finger on the code: which ranks are in the sums?

# %%
r = run(show.tracked(popular, send=dist.isend), ranks=4)
show.ring(r)

# %% [markdown]
# The chunk index goes up with the step where it must go down. So what a rank passes on in step 2 is not the chunk
# to which it has just added, but one that nobody has touched. No sum wanders, and no chunk ever gets all four
# ranks. You see it in the picture at once: after phase 1 a ring must have one finished chunk (thick frame, ✓) in
# each row. That is what to look for in the picture of your own exercise.
#
# ## Who does this for you
#
# The course's library has the same ring in `course_lib/collectives/ring.py`, with the sends and receives behind a
# small interface. So the same twenty lines run over other wires: here plain TCP, and memory that the ranks share.

# %%
from course_lib.collectives import TorchTransport, ring
from course_lib.collectives.shared import SharedTransport
from course_lib.collectives.tcp import TcpTransport


def over(wire):
    torch.manual_seed(dist.get_rank())
    tensor, transport = torch.randn(100_001), wire()
    ring.all_reduce(tensor, transport=transport)
    return tensor


wires = (TorchTransport, TcpTransport, SharedTransport)
by_torch, *others = zip(*run(lambda: [over(wire) for wire in wires], ranks=4).results, strict=True)
for wire, found in zip(wires[1:], others, strict=True):
    same = [torch.equal(found[rank], by_torch[rank]) for rank in range(4)]
    print(f"{wire.__name__:<16} the same bits as over torch: {same}")

# %% [markdown]
# The same bits on all wires: the algorithm decides them, not the transport. How *fast* the wires are is lesson 04
# (or `course bench ring` in a terminal).
#
# **"DDP has an optimised ring all-reduce built in", "DDP uses NCCL and the ring."** DDP itself contains no
# all-reduce. It packs gradients into buckets and calls the process group, and the backend chooses. Gloo takes a
# ring by default ([allreduce.cc](https://github.com/pytorch/gloo/blob/main/gloo/allreduce.cc)). NCCL takes a ring,
# a tree or others, by the number of GPUs and nodes and by the size of the message ([its
# developers](https://github.com/NVIDIA/nccl/issues/754): "no easy rule").
#
# ## In three lines
#
# - Reduce-scatter, then all-gather: in 2(N-1) steps every rank sends a chunk to the right and gets one from the
#   left.
# - Each rank sends 2(N-1)/N · M bytes, less than 2M with any number of ranks.
# - Each chunk is summed once and copied, so all ranks have the same bits; test it with three ranks or more.
#
# ## On A100s
#
# NVIDIA's `nccl-tests` report a *bus bandwidth*: the bytes that each rank really sends, 2(N-1)/N · M, divided by
# the time, so that it can be compared with what the wire can do
# ([how](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)). On eight A100 80GB with NVLink [a
# published run](https://github.com/NVIDIA/nccl-tests/issues/149) shows about 200 GB/s. ResNet-50 has 102 MB of
# float32 gradients; each of eight ranks sends 2 · 7/8 · 102 = 179 MB; at 200 GB/s that takes 0.9 ms. Over a 10
# Gbit/s network (1.25 GB/s) the same bytes take 143 ms: that is why part 4 of this course exists.
#
# ## Exercise
#
# [Exercise 03: the ring all-reduce](../exercises/03_ring_all_reduce/03_ring_all_reduce.ipynb) Close this page and
# write it yourself, with `op="mean"` as well. About 40 minutes.
