# %% [markdown]
# # 01 · Ranks
#
# **Afterwards you can** say what a rank, a backend and a rendezvous are; tell RANK from LOCAL_RANK; and say
# why we use processes and not threads.
#
# **Time** 20 minutes to read; the cells run in less than a minute.

# %%
import os

import torch
import torch.distributed as dist

from course_lib import run

# %% [markdown]
# ## One program, many processes
#
# A distributed training is **one program that is started several times**. Each start is a process of its own,
# with its own memory. It learns which one it is from environment variables.
#
# **Predict:** three ranks run this. Which of the four columns are equal on all ranks?


# %%
def who_am_i():
    return os.getpid(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]


print("   pid  RANK  LOCAL_RANK  WORLD_SIZE")
for pid, rank, local_rank, world_size in run(who_am_i, ranks=3).results:
    print(f"{pid:>6}  {rank:>4}  {local_rank:>10}  {world_size:>10}")

# %% [markdown]
# Only WORLD_SIZE. Three processes, three numbers. The variables were set by **`torchrun`**, which started the
# processes. You never set RANK by hand.
#
# (`run` uses `torchrun`'s own code, with two short cuts that save seconds at each call: the ranks are *forked* from a
# helper process, in which torch is imported already. `run(..., start="torchrun")` uses the plain command instead.)
#
# ## Nothing is shared
#
# **Predict:** each rank adds its own number to the list. What is in the list of rank 2? What is in the list
# here, in the notebook?

# %%
found = []


def collect():
    found.append(dist.get_rank())
    return found


print("in the ranks:   ", run(collect, ranks=3).results)
print("in the notebook:", found)

# %% [markdown]
# Each rank got a copy of `found` and changed its own. What a rank wants another one to know, it must send.
# That is also why an error in your data or a seed that differs between ranks stays invisible: every rank is
# happy with its own copy.
#
# ## Why processes and not threads?
#
# The usual build of Python runs the byte code of one thread at a time, because of the *global interpreter
# lock* (GIL). Processes have one interpreter each, and with it one lock each.
#
# **Predict:** we count down from ten million twice: one after the other, then in two threads, then on two
# ranks. What times do you expect, relative to the first?

# %%
import time
from concurrent.futures import ThreadPoolExecutor


def count(n=10_000_000):
    while n:
        n -= 1


def seconds(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


in_a_row = seconds(lambda: (count(), count()))
with ThreadPoolExecutor(2) as threads:
    threaded = seconds(lambda: [done.result() for done in [threads.submit(count) for _ in range(2)]])
ranks = run(count, ranks=2).seconds
print(f"one after the other {in_a_row:.2f} s, two threads {threaded:.2f} s, two ranks {ranks:.2f} s")

# %% [markdown]
# Two threads take about as long as doing it one after the other: they hand the lock back and forth. Two ranks
# take about half of that on two free cores. (Library code such as a matrix product releases the lock while it
# computes, so threads are not useless. But the Python part of a training loop, which feeds the GPU, would
# have to queue.)
#
# There is a second reason. One process can drive several GPUs, and PyTorch's old `DataParallel` does it with
# threads. But then everything else is shared too: one interpreter prepares the batches of all GPUs, and one
# crash ends them all.
#
# ## How ranks find each other: the rendezvous
#
# A new process knows nobody. It needs **one address that all know beforehand**, where they meet. That meeting
# is the *rendezvous*. `torchrun` puts the address into two more variables.


# %%
def meeting_point():
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


run(meeting_point, ranks=3).results

# %% [markdown]
# At this address one process keeps a small table of names and values, the *store*. Each rank writes down
# there how it can be reached and reads how to reach the others. After that they talk to each other directly.
# The port was chosen freely by `torchrun --standalone`, so that two jobs on one machine do not collide.
#
# What happens without a launcher? **Predict**, then run.

# %%
try:
    dist.init_process_group("gloo")
except ValueError as error:
    print(error)

# %% [markdown]
# It does not hang: it says at once which variable it expected. That is what you see when you start a training
# script by `python` instead of `torchrun`. (In the functions above you did not need this call: `run` has made
# it before it calls yours.)
#
# ## Backends: who carries the data
#
# The **backend** is the library that moves the bytes.

# %%
for name, there in {
    "gloo": dist.is_gloo_available(),
    "nccl": dist.is_nccl_available(),
    "mpi": dist.is_mpi_available(),
}.items():
    print(f"{name:5} {'is' if there else 'is not'} in this build of PyTorch {torch.__version__}")
print("GPUs here:", torch.cuda.device_count())

# %% [markdown]
# | backend | carries | use it |
# |---|---|---|
# | `gloo` | CPU tensors over TCP; some operations on CUDA tensors too | on a laptop, and beside NCCL for CPU data |
# | `nccl` | CUDA tensors, over NVLink, PCIe, InfiniBand or TCP | for training on NVIDIA GPUs |
# | `mpi` | whatever the MPI library can | only with a PyTorch that you built from source |
#
# If `nccl` "is in this build" although you have no GPU, that means the library was shipped, not that it can
# work: using it here raises an error. DDP itself does not care which backend it has. What you write in this
# course for gloo runs on NCCL once its tensors are on the GPU and the backend has the other name.
#
# ## Two nodes: RANK against LOCAL_RANK
#
# A **node** is one machine. With two of them you start one `torchrun` on each. Here we start two on this
# machine; their ranks do not know the difference.
#
# **Predict:** four ranks on two nodes. Fill in the table in your head: RANK 0 1 2 3, LOCAL_RANK ?


# %%
def place():
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    return [os.environ[name] for name in names]


print("RANK  LOCAL_RANK  GROUP_RANK  LOCAL_WORLD_SIZE  WORLD_SIZE")
for rank, local_rank, node, local_size, size in run(place, ranks=4, nodes=2).results:
    print(f"{rank:>4}  {local_rank:>10}  {node:>10}  {local_size:>16}  {size:>10}")

# %% [markdown]
# LOCAL_RANK starts again at 0 on each node. So there are two numbers with two jobs:
#
# - **LOCAL_RANK chooses the GPU.** Each node numbers its GPUs from 0. Rank 2 must use `cuda:0` *of its node*.
# - **RANK is for everything else**: which part of the data, who writes the log, `init_process_group`.
#
# Popular tutorials get this wrong in both directions, and nothing shows on one node, where the two are equal.
# Let us see what the mistake does on two. Each rank picks its share of eight samples, once by RANK and once
# by LOCAL_RANK.
#
# **Predict:** how many different samples does the job see in each case?


# %%
def share(variable):
    return list(range(8))[int(os.environ[variable]) :: int(os.environ["WORLD_SIZE"])]


for variable in ("RANK", "LOCAL_RANK"):
    shares = run(share, ranks=4, nodes=2, args=(variable,)).results
    print(f"{variable:>10}: {shares}  {len({s for one in shares for s in one})} of 8 samples")

# %% [markdown]
# By LOCAL_RANK the two nodes train on the same half, and the other half is never seen. No error, and the loss
# still falls.
#
# ## In three lines
#
# - A rank is a process; `torchrun` starts them and tells each its RANK, LOCAL_RANK and WORLD_SIZE.
# - They meet at MASTER_ADDR:MASTER_PORT, then talk directly, through a backend: gloo on CPUs, NCCL on NVIDIA GPUs.
# - LOCAL_RANK chooses the GPU; RANK decides everything else.
#
# ## On A100s
#
# A DGX A100 has eight GPUs, so one node runs eight ranks, `--nproc-per-node=8`. Two nodes have RANK 0 to 15
# and LOCAL_RANK 0 to 7 twice. The script calls `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`
# *before* it joins the process group. If two ranks take the same GPU, NCCL refuses: `Duplicate GPU detected`
# (as in [D-FINE issue 289](https://github.com/Peterande/D-FINE/issues/289)).
#
# ## Exercise
#
# [Exercise 01: who am I?](../exercises/01_ranks/01_ranks.ipynb) Read the environment in one function, right
# on any number of nodes. About 15 minutes.
#
# The last cell of an exercise checks it. To see where you are in all of them, type `course check` in a terminal
# (in JupyterLab: File, New, Terminal).
