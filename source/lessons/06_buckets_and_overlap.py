# %% [markdown]
# # 06 · Buckets and overlap
#
# **Afterwards you can** say what many small all-reduces cost, put gradients into buckets, start their all-reduces
# while backward still computes, see that on a timeline of your own run, and say when it pays and when not.
#
# **Time** 30 minutes to read; the cells run in about half a minute.

# %%
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import run, show
from course_lib.parallel import BucketedDDP, NaiveDDP, OverlappedDDP

# %% [markdown]
# ## Too many messages
#
# The wrapper of lesson 05 makes one all-reduce for each gradient. In `course_lib/parallel` it is called `NaiveDDP`.
# Beside it stands `BucketedDDP`: it copies gradients side by side into large flat tensors, the **buckets**, and
# reduces those. Both work *after* backward, in `synchronize()`.
#
# **Predict:** 40 small layers have 80 gradients with 666 kB in all. How many times faster is `synchronize()` when
# they go in one bucket: about equal, twice, more than ten times?


# %%
def small():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])


def synchronize_ms(wrap, bucket_mb=25.0, steps=5):
    model, found = wrap(small(), bucket_mb=bucket_mb), []
    for _ in range(steps):
        model(torch.randn(8, 64)).sum().backward()
        dist.barrier()  # all ranks begin together
        begin = time.perf_counter()
        model.synchronize()
        found.append((time.perf_counter() - begin) * 1000)
    return sorted(found)[steps // 2]


def measure(name, wrap, bucket_mb):
    r = run(synchronize_ms, ranks=2, args=(wrap, bucket_mb))
    calls = sum(m.op == "all_reduce" and m.rank == 0 for m in r.messages) // 5
    print(f"{name:20} {calls:3} all-reduces a step, {max(r.results):7.2f} ms")


measure("one each", NaiveDDP, 25)
measure("in buckets, 25 MiB", BucketedDDP, 25)

# %% [markdown]
# (One more than you expected: our wrappers also count, with 4 bytes a parameter, which ranks used it. So they can
# name the parameter that somebody left out.)
#
# The bytes are the same, the time is not. Lesson 04 says why: each all-reduce costs its latencies first, however
# small it is. **time ≈ number of all-reduces · α' + bytes · β'**, where α' and β' are those of a whole all-reduce.
# With 81 small ones you pay α' 81 times.
#
# **Predict:** and if the buckets have 0.1 MiB, so that seven are needed?

# %%
for bucket_mb in (0.001, 0.1):
    measure(f"buckets of {bucket_mb} MiB", BucketedDDP, bucket_mb)

# %% [markdown]
# Each bucket costs one α'. With buckets so small that nothing shares one, there are 81 all-reduces again. So why not
# one large bucket for everything? Because of the second idea.
#
# ## When is a gradient there?
#
# Until `backward()` returns the network is idle, and after it the processor is. But gradients do not come all at
# once. `register_post_accumulate_grad_hook` calls you when one is complete. (It hands over the *parameter*; the
# gradient is its `.grad`. Lesson 05 has shown what comes of mixing them up.)
#
# **Predict:** a model with layers 0, 1 and 2. Whose gradient comes first?

# %%
model, came = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]), []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
model(torch.randn(8, 64)).sum().backward()
came

# %% [markdown]
# The last layer's. Backward goes from the loss to the input, so the last layer is ready when most of the work is
# still to be done. Its all-reduce can start *now*. That needs three things, and here they are without buckets:


# %%
class EachAtOnce(nn.Module):
    """Start the all-reduce of each gradient when it comes. (Rank 0's parameters; buffers as in lesson 05.)"""

    def __init__(self, module):
        super().__init__()
        self.module, self.started = module, []
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.arrived)  # 1. a hook

    def arrived(self, parameter):
        handle = dist.all_reduce(parameter.grad, async_op=True)  # 2. a start that does not wait
        self.started.append((parameter, handle))

    def forward(self, x):
        return self.module(x)

    def synchronize(self):
        for parameter, handle in self.started:
            handle.wait()  # 3. a wait, after backward
            parameter.grad /= dist.get_world_size()
        self.started.clear()


# %% [markdown]
# Three warnings, each of which the exercise will test:
#
# - **Never wait in a hook.** It runs inside backward; while it waits, backward stands still.
# - **Do not touch the tensor before `wait()`.** The backend reads and writes it meanwhile. So divide afterwards, or
#   before.
# - **Same order on all ranks.** All-reduces meet by order, not by name. Here every rank runs the same layers, so it
#   fits.
#
# ## Both together
#
# `OverlappedDDP` has buckets *and* hooks. Buckets are filled from the last parameter to the first, in the order in
# which gradients come, and a bucket starts when its last gradient is there. Then the size of a bucket is a
# compromise. Large: few latencies. Small: the first one starts early, and little is left to do after the last one is
# full.
#
# **Predict** for the timelines: six layers of 1 MiB, buckets of 1.5 MiB. Where will the six bars of communication be?


# %%
def steps(wrap, bucket_mb, width=512, samples=256):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
    model = wrap(nn.Sequential(*layers), bucket_mb=bucket_mb)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(samples, width)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        model.synchronize()
        optimizer.step()


after = run(show.profiled(steps), ranks=2, args=(BucketedDDP, 1.5))
show.timeline(after)

# %% [markdown]
# For each rank the upper row is what it computes, the lower row what it sends, and the thin strip marks
# communication that is **exposed**: nothing is computed beside it. The line above the green marks `backward()`. Here
# every bar comes after it (the seventh, tiny one counts users). Dashed means that a rank waits for the other one;
# only full orange moves bytes.

# %%
beside = run(show.profiled(steps), ranks=2, args=(OverlappedDDP, 1.5))
show.timeline(beside)

# %% [markdown]
# Now the bars begin under the green. Use the arrow keys to go through them: the first all-reduce starts soon after
# the last layer's gradients are there. Only the last bucket cannot start before backward has its last gradient. The
# numbers to both:

# %%
for name, r in (("after backward", after), ("beside it", beside)):
    for t in show.overlap(r):
        sent = f"communication {t.communication * 1e3:6.2f} ms, {t.share:4.0%} of it overlapped"
        print(f"{name:15} rank {t.rank}: {sent}; step {t.step * 1e3:6.2f} ms")

# %% [markdown]
# Did the *step* get shorter as well? Perhaps not, and that is no mistake. Sending is work: gloo's threads copy and
# add, and they need a core. If you have as many ranks as cores, each all-reduce now takes time away from backward.
# Overlap hides communication behind computing that happens *elsewhere*.
#
# ## When it pays
#
# On a GPU it is elsewhere: the GPU computes, the processor has time, and the bytes travel through hardware of their
# own. We imitate that. The gradient of a layer `OnGPU` costs the processor next to nothing, but it comes 10 ms
# later, as if something else had computed it. The bytes are the same: 4 MiB a layer.
#
# **Predict:** four layers, three wrappers. For which kind of layer does overlap take more off a step, as a part of it?


# %%
class Later(torch.autograd.Function):
    """Passes values on; in backward something else computes for 10 ms."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.010)
        return grad


class OnGPU(nn.Linear):
    def forward(self, x):
        return Later.apply(x + self.weight.mean() + self.bias.mean())


# %%
def step_ms(wrap, layer):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*[layer(1024, 1024) for _ in range(4)]), bucket_mb=5)
    x, found = torch.randn(64, 1024), []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        model(x).square().mean().backward()
        model.synchronize()
        found.append((time.perf_counter() - begin) * 1000)
    return min(found)  # the step that was disturbed least


wrappers = (NaiveDDP, BucketedDDP, OverlappedDDP)
for layer in (nn.Linear, OnGPU):
    ranks = run(lambda layer: [step_ms(wrap, layer) for wrap in wrappers], ranks=2, args=(layer,)).results
    for wrap, *ms in zip(wrappers, *ranks, strict=True):
        print(f"{layer.__name__:7} {wrap.__name__:14} {max(ms):7.2f} ms")

# %% [markdown]
# Compare the last two lines. Same bytes, same buckets; but while something else computes, much of the communication
# costs nothing. With `Linear`, computing and sending need the same processor: how much is left to gain depends on
# how many cores are free. (If something else keeps your machine busy, run the cell again.)
#
# **step ≈ computing + communication that is exposed.** Overlap can hide at most as much as backward takes: once the
# bytes take longer than backward, you see the rest, whatever you do. Then send fewer bytes (lesson 07).
#
# ## torch's DDP does the same
#
# Two sayings. **"DDP waits until all gradients are ready, then does one all-reduce."** **"It communicates as soon as
# a parameter's gradient is ready."** **Predict:** what does DDP send in its first three steps, with buckets of 0.1
# MiB?


# %%
class TorchDDP(DistributedDataParallel):
    def synchronize(self):
        """Nothing is left to do: backward() returns when all is averaged."""


def three_steps():
    model = TorchDDP(small(), bucket_cap_mb=0.1)
    for _ in range(3):
        dist.barrier()  # marks the steps in the list of messages
        model(torch.randn(8, 64)).sum().backward()


step = -1
for m in run(three_steps, ranks=2).messages:
    step += m.rank == 0 and m.op == "barrier"
    if m.rank == 0 and step >= 0 and m.op != "barrier":
        print(f"step {step}: {m.op} of {m.nbytes:,} bytes")

# %% [markdown]
# Both are half true. In the *first* step everything went in one all-reduce. DDP used it to learn in which order
# gradients really come, and filled its buckets anew (the two small broadcasts: rank 0 tells the others). From the
# second step on there is one all-reduce for each *bucket*, when it is full, in the same order on all ranks. So look
# at the third step or a later one when you measure DDP.
#
# Look at the sizes, too. 0.1 MiB are 104,857 bytes, and these buckets have 116,480: DDP closes a bucket when it *has
# reached* its capacity. Ours, and yours in the exercise, stays below, unless a single tensor is larger. By default DDP
# has 25 MiB, and 1 MiB for the first bucket (`dist._DEFAULT_FIRST_BUCKET_BYTES`), so that it starts early.
#
# **"It overlaps with the computing of the next batch."** If so, something would still be under way when `backward()`
# returns. **Predict:** is the gradient of the *first* layer, the last one to come, the same on both ranks by then?


# %%
def when_backward_returns():
    model = TorchDDP(small())
    model(torch.randn(8, 64) + dist.get_rank()).sum().backward()  # other data on each rank
    return model.module[0].weight.grad


a, b = run(when_backward_returns, ranks=2).results
print("the same on both ranks:", torch.equal(a, b))

# %% [markdown]
# It is: DDP waits *inside* `backward()` for its last bucket. Nothing runs on into the next batch. (That would mean
# to step with old gradients; lesson 12 shows what this does.) Ours waits in `synchronize()`, which you call before
# the optimizer.
#
# It also makes "inside backward" a useless measure of overlap: DDP's communication lies there to 100 %, always, with
# a single bucket as well. `show.overlap` adds up when operators really ran, and compares that with the
# communication:


# %%
def torch_steps():
    steps(lambda module, bucket_mb: TorchDDP(module, bucket_cap_mb=bucket_mb), 1.5)


for t in show.overlap(run(show.profiled(torch_steps), ranks=2)):
    print(f"rank {t.rank}: {t.share:.0%} of the communication while something was computed")

# %% [markdown]
# ## In three lines
#
# - Each all-reduce costs a latency: put small gradients into buckets.
# - Gradients come from the last layer to the first: fill buckets in that order, start each when it is full, wait at
#   the end.
# - Overlap hides communication behind computing that does not need the same core; measure what is exposed, not what
#   is "inside backward".
#
# ## On A100s
#
# Li et al., *PyTorch Distributed* (VLDB 13(12), 2020), describe the design that you have just seen, and report
# nearly linear scaling to 256 GPUs with it. The 97.5 MiB of gradients of ResNet-50 make five buckets by torch's
# rule, with 7.8, 30.0, 25.0, 25.3 and 9.3 MiB (torchvision's model, last parameter first, in
# `dist._compute_bucket_assignment_by_size` with 1 and 25 MiB). Eight A100s reach 6.72 times the speed of one in
# NVIDIA's published table (mixed precision, DeepLearningExamples 21.03). Communication that is left exposed is one
# suspect; lesson 11 looks for others.
#
# ## Exercise
#
# [Exercise 06: buckets and overlap](../exercises/06_buckets_and_overlap/06_buckets_and_overlap.ipynb) Write the
# wrapper that has both, and look at its timeline. About 50 minutes.
