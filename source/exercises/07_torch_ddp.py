# %% [markdown]
# # Exercise 07: accumulate, and write a comm hook
#
# **Difficulty** medium, then hard · **Time** 20 and 35 minutes · **You write** about 10 and 12 lines ·
# **Points** 5 and 7
#
# ## 1. One update from several microbatches
#
# A batch that does not fit into memory is cut into **microbatches**. Their gradients are gathered, and the optimizer
# steps once.
#
# **Goal.** `accumulate(model, optimizer, microbatches)` makes one update. `model` is torch's DDP, `microbatches` a list
# of (inputs, labels) of this rank. For N ranks and gradients of M bytes:
#
# | | |
# |---|---|
# | gradient | that of the *mean* loss over all samples of all microbatches on all ranks, to 10 digits; not clipped |
# | uneven | all ranks have equally many microbatches; these differ in length, and may be empty, even all of a rank |
# | before | `.grad` may hold something already, which must not count |
# | memory | one microbatch at a time: it has its backward before the next one's forward |
# | bytes | the gradients go through the all-reduce once: M an update, not M a microbatch |
# | calls | beside that, one small all-reduce an update, and nothing for each microbatch; no barrier |
# | optimizer | one step (a closure may be given to it) |
#
# **The plan.** The loss is cross-entropy with `reduction="sum"`, since sums can be added. DDP *divides the sum of the
# ranks' gradients by N*. So multiply the loss by N, then divide it by the number of samples of all ranks, which takes
# an all-reduce of one number. (In this order: N divided by a tensor of whole numbers is float32, and the check's model
# is float64.) Forward and backward of all microbatches but the last go into `with model.no_sync():`
# (`contextlib.nullcontext()` is the context that does nothing).

# %%
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import check, run, show
from course_lib.parallel.hooks.onebit import pack, unpack


# %% solution="accumulate"
def accumulate(model, optimizer, microbatches):
    """One update. microbatches: list of (inputs, labels) of this rank; the loss is cross-entropy."""
    # about 10 lines: the number of samples of all ranks, zero_grad, a loop with no_sync or not, the step
    ### BEGIN SOLUTION
    count = torch.tensor(sum(len(labels) for _, labels in microbatches))
    dist.all_reduce(count)
    optimizer.zero_grad()
    for number, (inputs, labels) in enumerate(microbatches, 1):
        last = number == len(microbatches)
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(inputs), labels, reduction="sum")
            (loss * dist.get_world_size() / count).backward()
    optimizer.step()
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# Two ranks, three microbatches of 8, 8 and 4 samples, one update. The picture shows what was sent: one all-reduce of
# all gradients at the end of the last backward, and before it the one that counts samples. (Before your function DDP
# itself has sent the weights from rank 0.)


# %% tags=["show"]
def one_update():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(20, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate(model, optimizer, [(torch.randn(n, 20), torch.randint(5, (n,))) for n in (8, 8, 4)])


show.messages(run(one_update, ranks=2))

# %% [markdown]
# ### Check
#
# On 2 and 3 ranks, with fresh numbers. It looks at the gradients when the optimizer steps, at the weights after each
# update, at what is kept for backward, and at everything that is sent.

# %% graded="check_accumulate" points=5
check.accumulate(accumulate)

# %% [markdown]
# ## 2. A comm hook: one bit an element
#
# DDP calls a **comm hook** when a bucket is full, instead of its own all-reduce: `hook(state, bucket)`, with exactly
# these names. `bucket.buffer()` is the flat tensor of gradients, `bucket.parameters()` is the list of parameters
# that they belong to. The hook returns a **Future** of the averaged gradient, and backward goes on meanwhile.
#
# **Goal.** `onebit_hook(state, bucket)` sends only the *sign* of each element, and one scale for the bucket. What that
# loses is not lost: it waits in `state`, a dict that is empty at first, and is added to the next gradient (**error
# feedback**, Seide et al. 2014).
#
# | | |
# |---|---|
# | `wanted` | the gradient plus what was left over from the step before |
# | `sent` | +scale where `wanted >= 0`, else -scale; the scale is the mean of \|wanted\| over the bucket |
# | left over | `wanted - sent`, for the next step: in `state` and nowhere else |
# | result | the mean of all ranks' `sent`, the same bits on all ranks, in a tensor like `bucket.buffer()` |
# | overlap | the hook waits for nobody: it returns the Future at once |
# | bytes | 1/8 for each element, and the scale: with float32 about a 32nd |
#
# **The plan.** Bits cannot be added on their way, so each rank gathers the bits of all. `pack(signs, scale)` makes one
# uint8 tensor of booleans and a scale, and `unpack(payload, [numel], dtype)` makes `sent` of it.
#
# 1. `work = dist.all_gather(everyones, payload, async_op=True)` starts the exchange; `everyones` is a list of tensors
#    like `payload`, one for each rank.
# 2. `work.get_future().then(decode)` is the Future to return. `decode(_)` is called when the bytes are there; it takes
#    `everyones` apart, and returns the mean. (It may write it into the buffer and return that: a tensor less.)
#
# **A trap.** After its first backward DDP knows in which order gradients arrive, and fills its buckets anew. Bucket 0
# then has other parameters, or the same in another order. So what is left over belongs to parameters, not to
# `bucket.index()`. A good key for `state` is `tuple(bucket.parameters())`. When the buckets change, drop what was left,
# or keep it for each parameter and let it follow: both are right here.


# %% solution="onebit_hook"
def onebit_hook(state, bucket):
    """The mean over all ranks of sign * scale. state: a dict for what is left over. Returns a Future."""
    # about 12 lines: wanted, payload, what is left over, the all-gather, decode, the Future
    ### BEGIN SOLUTION
    gradient, key = bucket.buffer(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    payload = pack(wanted >= 0, wanted.abs().mean())
    state[key] = wanted - unpack(payload, [len(wanted)], wanted.dtype)
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    work = dist.all_gather(everyones, payload, async_op=True)

    def decode(_):
        sent = [unpack(theirs, [len(gradient)], gradient.dtype) for theirs in everyones]
        return gradient.copy_(sum(sent) / len(sent))

    return work.get_future().then(decode)
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# The same model, data and learning rate three times: exact, with your hook, and with your hook when it forgets what was
# left over (an empty `state` in each step). Look at the end of the curves: with error feedback the loss gets nearly as
# low as with exact averages, at about a 32nd of the bytes. Without it, it does not.


# %% tags=["show"]
def losses(way):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5)))
    state, teacher = {}, torch.randn(20, 5)
    if way != "exact":
        model.register_comm_hook(state, onebit_hook)
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.2), []
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(200, 20)
    for _ in range(60):
        if way == "forgets":
            state.clear()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


ways = ("exact", "with feedback", "forgets")
curves = run(lambda: {way: losses(way) for way in ways}, ranks=2).results[0]
show.curves(curves, "step", "loss of rank 0")

# %% [markdown]
# ### Check
#
# On 2 and 3 ranks, in four steps, with gradients that the check makes up: averages, bits and bytes. In one case it
# empties `state` on the way, in another a rank comes late, in each step.

# %% graded="check_onebit_hook" points=7
check.onebit_hook(onebit_hook)
