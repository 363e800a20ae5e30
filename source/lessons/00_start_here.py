# %% [markdown]
# # 00 · Start here
#
# You can train a model on one GPU. This course takes you to eight, and to several machines. You will write
# the ring all-reduce by hand, grow it into data parallelism, compare it with PyTorch's
# `DistributedDataParallel` (DDP), and end with a training loop that runs unchanged on this laptop and on a
# cluster.
#
# **In this lesson** you check this machine, start four processes from a cell, and train a first model on two.
#
# **Time** about 10 minutes to read; the cells run in about a minute. **You need** Python and a little
# PyTorch: tensors, a model, a training loop. No GPU.
#
# **The course** is planned as sixteen lessons after this one, in four parts: *talk* (messages and all-reduce), *sync*
# (data parallelism), *train* (a loop that survives) and *scale* (GPUs and many machines). Expect half an hour for a
# lesson and as much for its exercise. The table in `README.md` says which are there already.
#
# How to work: before you run a cell, say aloud what you expect. A surprise is where you learn something.

# %%
from course_lib import run, show, train

# %% [markdown]
# ## This machine
#
# Everything in the course runs on a CPU. A GPU only makes it faster.

# %%
show.machine()

# %% [markdown]
# If a line reports a problem, it also says the cure. `course doctor` in a terminal checks more: memory, network
# names, GPUs, and a real exchange between two processes.
#
# ## Four ranks
#
# To use several GPUs you start **several copies of one program**, one for each GPU. Each copy is a **rank**
# and has a number. The number of ranks is the **world size**.
#
# Here is a function for one rank. It asks for its number, then all ranks add up their numbers with
# `all_reduce`, which leaves the sum on every rank.
#
# **Predict:** four ranks run this. What does each print?

# %%
import torch
import torch.distributed as dist


def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = torch.tensor([rank])
    dist.all_reduce(number)
    print(f"rank {rank} of {world_size}: the sum is {number.item()}")
    return number.item()


r = run(hello, ranks=4)

# %% [markdown]
# Every rank printed `the sum is 6`, since 0 + 1 + 2 + 3 = 6. The lines may come in any order: the ranks are
# independent processes, and each prints when it gets there.
#
# `run` started four real processes with `torchrun`, PyTorch's own launcher, and brought back what they
# returned:

# %%
r.results

# %% [markdown]
# ## Who sent what to whom?
#
# Ranks share no memory. They only know of each other what they send. Let each rank send its number to the next
# rank, round in a ring.
#
# **Predict:** how many messages is that with four ranks? What does rank 0 receive?


# %%
def pass_on():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine, received = torch.tensor([rank]), torch.empty(1, dtype=torch.int64)
    sending = dist.isend(mine, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    sending.wait()
    return received.item()


r = run(pass_on, ranks=4)
print(r.results)
show.messages(r)

# %% [markdown]
# Four messages of 8 bytes each (one 64-bit integer), and rank 0 received 3. The picture shows your own run: one
# lane a rank, time from left to right, an arrow for each message. Click into it and step through with the arrow
# keys. Lesson 02 explains why the cell says `isend` and not `send`.
#
# ## When something goes wrong
#
# Distributed programs mostly fail by waiting. Here rank 0 waits for a message that nobody sends.
#
# **Predict:** what will you see, and after how long?


# %% tags=["raises-exception"]
def wait_in_vain():
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), src=1)


run(wait_in_vain, ranks=2)

# %% [markdown]
# The cell ended after a few seconds and said who waits, in which line, and why it is hopeless. Started by
# hand, the same program would sit there silently until gloo's timeout, 30 minutes by default. You may
# interrupt a cell at any time (the ■ button, or Esc and then `I` twice): all its processes end.
#
# ## A first training
#
# `train` starts the course's training loop as a program of its own, with the command that it prints first. On a
# cluster you would type that same command. The recipe `digits` trains a small network on 1,797 scans of
# handwritten digits, which come with the course; 360 of them are kept for the test. Here two ranks share the
# work: each sees half of every batch.
#
# **Predict:** what accuracy on digits that the model has not seen?

# %%
t = train("digits", ranks=2)
show.loss(t)

# %% [markdown]
# The curve shows the mean loss of the whole batch, over both ranks, at each step, and the marks show the
# accuracy on the test digits. All that the run wrote stands in its folder:

# %%
print(t.dir)
print(t.metrics[-1])

# %% [markdown]
# ## Is it faster with two ranks?
#
# **Predict:** the same training with one rank. Does it take more time, or less?

# %%
one = train("digits", ranks=1)
show.loss(t, one, labels=["2 ranks", "1 rank"])

# %% [markdown]
# Look at the samples per second of both. This model is so small that talking costs more than the work that is
# saved: on most laptops one rank is as fast as two, or faster. More processes pay when there is enough work
# for each between two conversations. How much is enough, you will calculate in lesson 04 and measure from
# lesson 06 on.
#
# The two curves lie close together, though: two ranks with half a batch each take the same steps as one rank
# with the whole batch, up to rounding. Lesson 05 proves it.
#
# ## In three lines
#
# - A **rank** is one process, with its number; the **world size** is how many there are.
# - Ranks share nothing: what one knows of another came in a message.
# - More ranks are faster only when the work between messages outweighs the messages.
#
# ## On A100s
#
# The same loop takes `--nproc-per-node=8` on a machine with eight A100 GPUs, and uses NCCL instead of gloo.
# NVIDIA reports for ResNet-50 on a DGX A100 80GB 2,470 images a second on one GPU and 16,621 on eight with
# mixed precision, 6.7 times as many, and 938 and 7,248 (7.7 times) in TF32
# ([DeepLearningExamples](https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5),
# container 21.03). The faster the GPUs compute, the harder it is to hide the communication.
#
# ## Next
#
# [01 · Ranks](01_ranks.ipynb): what a rank is, and how ranks find each other.
