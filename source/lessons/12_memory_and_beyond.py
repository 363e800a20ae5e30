# %% [markdown]
# # 12 · Memory and beyond
#
# **Afterwards you can** say where the memory of a training step goes, and which remedy makes which part smaller:
# recomputing activations, ZeRO, FSDP2, tensor and pipeline parallelism; say what each of them sends; and say what a
# parameter server's old gradients do to training.
#
# **Time** 45 minutes to read; the cells run in less than a minute.

# %%
import time
from collections import Counter
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import run, show
from course_lib.parallel import pipeline_schedule, server
from course_lib.parallel.pipeline import PipelineStage
from course_lib.parallel.tensor import TensorParallelPair
from course_lib.parallel.zero import ZeroOne
from course_lib.train.placement import recompute

# %% [markdown]
# DDP keeps weights, gradients and optimizer whole on every rank. Often it is recommended "for models that are too big
# for one GPU". **DDP never helps when weights, gradients and optimizer do not fit.** More ranks give each rank fewer
# samples, and that is all they make smaller. So what is it that does not fit?
#
# ## Where memory goes
#
# Four things: weights, gradients, what the optimizer keeps, and **activations**: what autograd saves in the forward
# for the backward. `saved_tensors_hooks` shows us each tensor that it saves. We count every piece of memory once, and
# leave out the weights, which are there anyway.


# %%
def build(depth=16, width=256):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def loss_and_saved(model, x):
    weights, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    return loss, sum(nbytes for at, nbytes in found.items() if at not in weights)


# %% [markdown]
# Sixteen layers of 256x256 with Adam. **Predict:** how do gradients and optimizer compare with the weights? At which
# batch size do activations become the largest part?


# %%
def mib(nbytes):
    return f"{nbytes / 2**20:5.1f} MiB"


model = build()
optimizer = torch.optim.Adam(model.parameters())
saved = {}
for batch in (32, 512, 2048):
    loss, saved[batch] = loss_and_saved(model, torch.randn(batch, 256))
loss.backward()
optimizer.step()

# %%
print("weights    ", mib(sum(p.nbytes for p in model.parameters())))
print("gradients  ", mib(sum(p.grad.nbytes for p in model.parameters())))
print("optimizer  ", mib(sum(t.nbytes for state in optimizer.state.values() for t in state.values())))
for batch, nbytes in saved.items():
    print(f"activations {mib(nbytes)} with batch {batch}")

# %% [markdown]
# Gradients are as large as the weights, and Adam keeps two averages for each weight. These three parts depend on the
# model only, and activations on the batch, too: four times the samples, four times the bytes. So ask first *which* part
# is too large. If it is activations, a smaller batch with accumulation (lesson 07) is the simplest help.
#
# ## Compute it again
#
# **Activation checkpointing** (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016) keeps only what goes
# into each *segment* of layers, and in backward computes the segment's forward again. `torch.utils.checkpoint` does so
# for one function; the course's `recompute` puts it around segments. Beside it, bf16 autocast, since "mixed precision
# halves memory". **Predict** the bytes saved, how often a linear layer is called in a step, and whether
# gradients keep their bits.


# %%
def step(again=False, bf16=False):
    model, calls = build(), []
    for layer in model[::2]:
        layer.register_forward_pre_hook(lambda layer, x: calls.append(layer))
    if again:
        recompute(model)
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss, nbytes = loss_and_saved(model, x)
    loss.backward()
    return nbytes, len(calls), [p.grad for p in model.parameters()]


plain = step()
for name, found in {"plain": plain, "recomputed": step(again=True), "bf16 autocast": step(bf16=True)}.items():
    print(f"{name:<14} {mib(found[0])}, {found[1]} calls,", end=" ")
    print(f"gradients equal: {all(map(torch.equal, found[2], plain[2]))}, of {found[2][0].dtype}")

# %% [markdown]
# - **The same bits**, because the same forward is run again: one more forward for each segment (not for the last one,
#   whose backward comes at once). With dropout, torch restores the random numbers for it.
# - **Only activations shrink.** "Trains models three times as large" holds for the activations' part of the table
#   above. In backward, one segment's activations are there again, on top of what was kept; segments as long as the
#   square root of the depth make the sum small.
# - **Pass `use_reentrant=False`.** The old, reentrant kind is still what `checkpoint_sequential(model, 4, x)` takes,
#   with a warning, and fails together with DDP's `find_unused_parameters`.
# - **bf16** halves activations, and keeps copies of the weights, which this row contains. The numbers
#   are others, of course, but weights, gradients and optimizer stay float32.
#
# ## ZeRO-1: each rank keeps a part of the optimizer
#
# All ranks do the same update with the same averages: N times the same work, from N times the same state. **ZeRO**,
# stage 1 (Rajbhandari et al. 2020), cuts the weights into N parts. Reduce-scatter gives each rank the averaged
# gradient of *its* part; it updates that part; all-gather brings the new weights to all. The heart of
# `course_lib/parallel/zero.py`:
#
# ```python
# dist.reduce_scatter_single(self.part.grad, gradients)
# self.part.grad /= self.ranks
# self.optimizer.step()
# dist.all_gather_single(self.flat, self.part.detach())
# ```
#
# An all-reduce over a ring *is* a reduce-scatter and an all-gather (lesson 03). **Predict:** what does a rank keep for
# Adam now? Does it send more than DDP? Are the weights the same?


# %%
def train_step(model, optimizer, k):
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(10 * k + dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam_twice():
    one, two = DistributedDataParallel(build(4)), build(4)
    adam, zero = torch.optim.Adam(one.parameters()), ZeroOne(two.parameters(), torch.optim.Adam)
    for k in range(5):
        train_step(one, adam, k)
    dist.barrier()
    for k in range(5):
        train_step(two, zero, k)
    whole = sum(t.nbytes for state in adam.state.values() for t in state.values() if t.ndim)
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return whole, zero.state_bytes(), max((a - b).abs().max().item() for a, b in pairs)


# %%
def calls(r, ops):
    return dict(Counter((m.op, m.nbytes) for m in r.messages if m.rank == 0 and m.op.startswith(ops)))


r = run(adam_twice, ranks=2, quiet=True)
print("Adam's bytes with DDP, with ZeRO-1, largest difference of a weight:", *r.results, sep="\n")
calls(r, ("all_reduce", "reduce_scatter", "all_gather_"))

# %% [markdown]
# Half the state with two ranks, an N-th with N; not a bit of difference; and instead of each all-reduce one
# reduce-scatter of as many bytes and one all-gather, into which each rank puts its part. (With more than two ranks,
# sums may run in another order, and last bits differ.) In torch it is called `ZeroRedundancyOptimizer`, and goes on
# top of DDP: it all-reduces and then broadcasts each part, so it sends more than ZeRO needs. Weights and gradients are
# still whole on each rank.
#
# ## FSDP2: nothing is whole
#
# ZeRO-3 cuts weights and gradients, too. A layer's weights are gathered just before it computes, and let go
# afterwards. In torch it is `fully_shard`, known as FSDP2: three lines, a call for each unit that is gathered at once,
# and one for the rest. The optimizer comes *after* them. **Predict:** how many all-gathers in one step for four
# units?


# %%
def sharded():
    model, whole = build(4), DistributedDataParallel(build(4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters())
    train_step(whole, torch.optim.Adam(whole.parameters()), 0)
    train_step(model, adam, 0)
    pairs = zip(whole.parameters(), model.parameters(), strict=True)
    far = max((a - b.full_tensor()).abs().max().item() for a, b in pairs)
    kept = [sum(p.nbytes for p in whole.parameters()), sum(p.to_local().nbytes for p in model.parameters())]
    return *kept, sum(t.to_local().nbytes for state in adam.state.values() for t in state.values() if t.ndim), far


r = run(sharded, ranks=2)
print("Weights whole, weights here, Adam here, largest difference of a weight:", *r.results, sep="\n")
calls(r, ("all_gather_single", "reduce_scatter"))

# %% [markdown]
# The weights are those of DDP, and each rank has half of everything. The price: every unit is gathered twice, once in
# forward and, since it was let go, once more in backward; then its gradients are reduce-scattered. Counted over a
# ring, that is three passes of the weights' bytes where DDP has two. Parameters are `DTensor`s now: `p.to_local()` is
# this rank's part, `p.full_tensor()` the whole, and a checkpoint is written in parts by `torch.distributed.checkpoint`.
# While a unit computes it must fit as a whole, with its activations.
#
# ## Tensor parallel: cut a layer
#
# Until here each rank had samples of its own. Now all have the *same* samples, and each a part of the layer
# (Shoeybi et al., *Megatron-LM*, 2019). The first of two linear layers is cut by outputs, the second by inputs. What
# lies between them acts on each number by itself, so nothing need be sent there. **Predict:** how many messages in
# forward, how many in backward? How large, for 32 samples of 64 float64 numbers?


# %%
def pair_against_whole():
    torch.manual_seed(0)
    first, second = nn.Linear(64, 256).double(), nn.Linear(256, 64).double()
    x = torch.randn(32, 64, dtype=torch.float64, requires_grad=True)
    pair = TensorParallelPair(first, second)
    mine = slice(128 * dist.get_rank(), 128 * dist.get_rank() + 128)
    y = pair(x)
    dist.barrier()
    found = torch.autograd.grad(y.square().sum(), [x, pair.first.weight, pair.second.weight])
    wanted = torch.autograd.grad(second(F.gelu(first(x))).square().sum(), [x, first.weight, second.weight])
    wanted = wanted[0], wanted[1][mine], wanted[2][:, mine]
    return [f"{((a - b).norm() / b.norm()).item():.0e}" for a, b in zip(found, wanted, strict=True)]


r = run(pair_against_whole, ranks=2)
print("Gradients of input, first and second weight are off by", *r.results, sep="\n")
[(m.op, m.nbytes) for m in r.messages if m.rank == 0]

# %% [markdown]
# Exact, up to the order of the sum. One all-reduce before the barrier: each rank's second layer gives a summand of the
# output. One after it: each rank knows what *its* outputs say about the input, and the layers before need the sum.
# The bytes are those of activations, not of weights, and **everybody waits for them**: the next layer cannot begin. So
# tensor parallel wants the fastest links, those inside one machine.
#
# ## Pipeline: cut the model
#
# Rank 0 has the first layers, the last rank the last. "Pipelining overlaps computation with communication", one can
# read. Its purpose is another: to keep all stages *busy*. With one batch, one stage works and the others wait; so the
# batch is cut into microbatches. Here is when each stage does what, if a backward takes twice a forward:


# %%
def draw(axes, ops, name):
    for stage, op, start, end in pipeline_schedule.timeline(ops):
        colour = "tab:blue" if op.kind == "forward" else "tab:orange"
        axes.barh(stage, end - start, left=start, color=colour, edgecolor="white")
        axes.text((start + end) / 2, stage, op.microbatch, ha="center", va="center", color="white")
    stored = [pipeline_schedule.peak_stored(stage) for stage in ops]
    axes.set(title=f"{name}: microbatches kept at once, by stage: {stored}", ylabel="stage", yticks=range(len(ops)))
    axes.invert_yaxis()


schedules = {"GPipe": pipeline_schedule.gpipe, "1F1B": pipeline_schedule.one_f_one_b}
figure, rows = plt.subplots(2, sharex=True, figsize=(7, 4), layout="constrained")
for axes, (name, schedule) in zip(rows, schedules.items(), strict=True):
    draw(axes, schedule(3, 6), name)
rows[1].set_xlabel("time, in forwards of one microbatch (blue: forward, orange: backward, white: waiting)")
plt.show()

# %% [markdown]
# Both end at the same time. A stage waits while the pipeline fills and while it empties: of P stages and M
# microbatches, a part **(P - 1) / (M + P - 1)** of the time, the *bubble*. What 1F1B changes is memory: a stage begins
# with backwards as soon as it can, and keeps at most P microbatches instead of all M.
#
# Now for real, with three ranks that send and receive. Two cores cannot compute three stages at once, so our stages
# *sleep*: 20 ms forward, 40 ms backward. What we measure is waiting, and messages; the better of two times counts.
# **Predict** the bubble for 2 and 6 microbatches. Will it be above or below the formula?


# %%
class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.04)
        return gradient


class Stage(nn.Sequential):
    def forward(self, x):
        return Sleep.apply(super().forward(x))


# %%
def seconds(stage, ops, x, y):
    dist.barrier()
    start = time.perf_counter()
    stage.run(ops, x, y)
    dist.barrier()
    return time.perf_counter() - start


def bubbles():
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), {}
    x, y = torch.randn(12, 8), torch.randn(12, 8)
    stage = PipelineStage(Stage(nn.Linear(8, 8)), x[0], F.mse_loss)
    for name, schedule in schedules.items():
        for m in (2, 6):
            ops = schedule(ranks, m)[rank]
            whole = min(seconds(stage, ops, x, y) for _ in range(2))
            found[name, m] = 1 - 0.06 * m / whole, stage.peak
    return found


for (name, m), (part, peak) in run(bubbles, ranks=3).results[0].items():
    predicted = pipeline_schedule.bubble(3, m)
    print(f"{name:<5} {m} microbatches: bubble {part:.0%}, predicted {predicted:.0%}; rank 0 kept {peak}")

# %% [markdown]
# It should be above the formula: messages and the program itself take time, too, which it leaves out (and more of it,
# the busier this machine is with other things). The gradients are those of the whole model on the whole batch. More
# microbatches make the bubble small; but small microbatches use a GPU badly, so M cannot grow for ever. And the formula
# takes all stages to be equally long. When they are not, the others wait for the slowest one, too: the exercise says
# how long.
#
# ## Nobody waits: a parameter server
#
# All of the above is *synchronous*. A **parameter server** is not: it holds the weights; a worker pulls them, computes
# a gradient and pushes it, and the server applies it at once (Dean et al. 2012). Nobody waits for a slow worker. But
# while one computes, the others push, and its gradient belongs to weights that are gone. With W equal workers it is
# W - 1 updates old: its **staleness**. Logistic regression on the scanned digits; **predict** what happens with 2, 9
# and 17 workers at the rate that is good for one.

# %%
data = np.load(files("course_lib") / "data" / "digits.npz")
images, labels = torch.tensor(data["images"]).float().flatten(1) / 16, torch.tensor(data["labels"]).long()
batches = torch.randint(len(images), (300, 32), generator=torch.Generator().manual_seed(1))


def digits_loss(weights, rows=slice(None)):
    return F.cross_entropy(images[rows] @ weights.view(64, 10), labels[rows])


def gradient(weights, t):
    return torch.autograd.grad(digits_loss(weights.requires_grad_(), batches[t]), weights)[0]


lines = {}
for staleness in (0, 1, 8, 16):
    path = server.train(gradient, torch.zeros(640), lr=0.5, updates=300, staleness=staleness)
    lines[f"staleness {staleness}"] = [digits_loss(w).item() for w in path]
show.curves(lines, "updates, all workers together", "training loss", log=True)

# %% [markdown]
# No error and no waiting. With two workers nothing is lost. With more, the loss soon *rises*, and it takes many
# updates to make up for that: updates come faster, and each is worth less. On a quadratic loss one can say when it
# breaks: the learning rate must stay below `largest_lr`, and that shrinks about as fast as staleness grows.

# %%
print({staleness: round(server.largest_lr(curvature=1.0, staleness=staleness), 3) for staleness in (0, 1, 8, 20)})

# %% [markdown]
# ### Delay compensation
#
# The server knows how far the weights have moved since the worker pulled them. If it knew the curvature, too, it could
# correct the gradient. Zheng et al. (2017) take the squared gradient for it: `g + λ g ⊙ g ⊙ (now - pulled)`. 200
# quadratics of curvature 1, with noise in each gradient, staleness 20, and a learning rate of 0.1: more than the limit
# just printed. **Predict** which λ brings us how close to the minimum. The last row has half the rate and no λ.

# %%
noise = 0.1 * torch.randn(400, 200, generator=torch.Generator().manual_seed(0))


def distance(**knobs):
    path = server.train(lambda w, t: w + noise[t], torch.full((200,), 3.0), updates=400, **knobs)
    return path[-50:].square().mean().sqrt().item()


print(f"{'no staleness':<16} {distance(lr=0.1):.3f}")
for strength in (0, 0.25, 0.5, 1, 2):
    print(f"λ = {strength:<12} {distance(lr=0.1, staleness=20, compensation=strength):.3f}")
print(f"{'half the rate':<16} {distance(lr=0.05, staleness=20):.3f}")

# %% [markdown]
# Without compensation the weights run away. A moderate λ stops that: far from the minimum gradients are large, and so
# is the correction. But it does not bring us home: near the minimum `g ⊙ g` vanishes faster than `g`, nothing is
# corrected, and the weights swing back and forth. Too large a λ ends in `nan`. The squared gradient is a fair guess of
# curvature for a likelihood near its optimum, and not in general: **compensation is a knob to tune, and no way around
# the limit.** A smaller rate is. Synchronous training has no such knob, and has become the usual way; what is left of
# the problem, slow ranks, is found by measuring (lesson 11).
#
# ## In three lines
#
# - Count first: weights, gradients, optimizer, activations. DDP makes none of the first three smaller.
# - Recomputing shrinks activations for one more forward; ZeRO-1 cuts the optimizer for no more bytes; FSDP cuts
#   everything for half as many again.
# - Tensor parallel cuts layers and sends activations; a pipeline cuts the model and pays a bubble; a parameter server
#   waits for nobody and pays with old gradients.
#
# ## On A100s
#
# A model in float32 with Adam needs 16 bytes a parameter before the first activation: 4 each for weight, gradient and
# two averages. So 80 GB end at about 5 billion parameters, and DDP on a thousand GPUs ends there, too. ResNet-50 with
# its 25.6 million is far below: there activations decide, thus the batch size, and `--model.recompute` buys a larger
# one with time. The usual order of remedies: AMP, a smaller batch with accumulation, recomputing, ZeRO-1, FSDP2;
# tensor parallel inside a machine with NVLink and pipelines between machines only when these are not enough.
#
# ## Exercise
#
# [Exercise 12: memory and beyond](../exercises/12_memory_and_beyond/12_memory_and_beyond.ipynb) Write ZeRO-1 by hand,
# and find a pipeline's bubble. About 55 minutes.
