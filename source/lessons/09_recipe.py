# %% [markdown]
# # 09 · Recipe
#
# **Afterwards you can** choose the learning rate for any number of ranks and know when the rule does not hold; write
# warm-up and cosine as a pure function of the step; clip the right gradients; and put mixed precision, its scaler and
# the optimizer into the one order in which an overflow on one rank does no harm.
#
# **Time** 45 minutes to read; the cells run in less than a minute.

# %%
import warnings
from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from course_lib import run, show, train
from course_lib.parallel.naive import NaiveDDP
from course_lib.train.optim import decay_groups
from course_lib.train.schedule import rate, scaled

# %% [markdown]
# ## More ranks, a larger batch
#
# A step of DDP averages over the samples of all ranks. So what matters is the **global batch**:
#
# samples of a rank at a time x microbatches x ranks
#
# With more ranks you have two choices. *Keep the global batch*: each rank gets less, and training is, step by step,
# what it was (lesson 05). Or *keep the batch of a rank*: then there are fewer steps in an epoch, and each must go
# further. This section is about the second choice. It needs no ranks: a large batch is a large batch.
#
# A small network, the digits, and the way that its weights go in one pass over 256 samples:

# %%
data = np.load(files("course_lib") / "data" / "digits.npz")
X, Y = torch.tensor(data["images"]).float().flatten(1) / 16, torch.tensor(data["labels"]).long()
MAKE = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def moved(optimizer, lr, batch, factor=1.0):
    model = net()
    steps, start = MAKE.get(optimizer)(model.parameters(), lr=lr), parameters_to_vector(model.parameters()).detach()
    for x, y in zip(X[:256].split(batch), Y[:256].split(batch), strict=True):
        steps.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        steps.step()
    return parameters_to_vector(model.parameters()).detach() - start


# %% [markdown]
# Eight steps with 32 samples each, against one step with all 256 and eight times the rate. **Predict:** for which
# optimizer, and for which rates, do they end at nearly the same place?

# %%
for optimizer, rates in (("sgd", (0.001, 0.01, 0.1, 1.0)), ("adam", (0.0001, 0.001, 0.01))):
    for lr in rates:
        small, large = moved(optimizer, lr, 32), moved(optimizer, 8 * lr, 256)
        print(f"{optimizer:<5} {lr:<7} one large step is off by {(large - small).norm() / small.norm():.0%}")

# %% [markdown]
# For SGD with a small rate they agree: while the weights hardly move, eight gradients add up to eight times their mean.
# That is where the **linear rule** comes from, and it says where it ends: with large rates the gradient changes on the
# way. For Adam the two have little in common at any rate.
#
# You may have read a derivation by variance: "N times the samples, 1/N of the variance, so N times the rate". That is
# no derivation. The noise shrinks by the square root of N, and so this argument would give the square root.
#
# **Predict:** we multiply the loss by 1000. How far does the first step go now?

# %%
for optimizer in MAKE:
    lengths = [moved(optimizer, 0.01, 256, factor).norm().item() for factor in (1, 10, 1000)]
    print(optimizer, [round(length, 4) for length in lengths])

# %% [markdown]
# Adam divides the gradient by its own size, so its first step has the same length whatever the gradient's scale is. Its
# steps do not grow with anything that N does to the gradient; only their noise shrinks. A rule for Adam is therefore
# the **square root** (Malladi et al. 2022), and a first guess, to be tuned.
#
# "`lr = base_lr * world_size`, with Adam, otherwise convergence is very slow" stands on a web page. **Predict** the
# test accuracy after 4 epochs when the batch grows from 16 to 128, with 1, √8 and 8 times the rate:


# %%
def accuracy(optimizer, lr, batch, seed):
    model = net(seed)
    steps, random = MAKE.get(optimizer)(model.parameters(), lr=lr), torch.Generator().manual_seed(seed)
    test, rest = torch.randperm(len(X), generator=random).split([397, 1400])
    for _ in range(4):
        for part in rest[torch.randperm(1400, generator=random)].split(batch):
            steps.zero_grad()
            F.cross_entropy(model(X[part]), Y[part]).backward()
            steps.step()
    return (model(X[test]).argmax(1) == Y[test]).double().mean().item()


for optimizer, lr in (("sgd", 0.1), ("adam", 0.03)):
    line = f"{optimizer:<5} batch 16: {accuracy(optimizer, lr, 16, 0):.3f}   batch 128:"
    for times in (1, 8**0.5, 8):
        found = np.mean([accuracy(optimizer, lr * times, 128, seed) for seed in range(3)])
        line += f"   {found:.3f} with {times:.1f} lr"
    print(line)

# %% [markdown]
# SGD wants the factor 8. Adam is hardly worse with its old rate, and does badly with 8 times it. (A toy, and three
# seeds: the order is the message, not the digits. Start from 0.01 instead of 0.03, and Adam bears 8 times the rate as
# well. That is what "tune it" means.)
#
# ### Relative to what?
#
# Two more lines from web pages: `lr = 0.1 * world_size`, with 64 images on each of 8 GPUs; and, in another place,
# `lr: 0.4  # 0.1 x total GPUs`, on 4 nodes with 8 GPUs each. The 0.1 that both start from is for **256 images**.
# **Predict** the right rate for the first, and what 0.4 should be, if 0.1 were really meant for each GPU:

# %%
print("8 x 64 images:", scaled(0.1, 8 * 64, reference=256, optimizer="sgd"), "  not", 0.1 * 8)
print("0.1 x 32 GPUs:", 0.1 * 32, "  0.4 is 0.1 x", round(0.4 / 0.1), "nodes")
print("Goyal et al.: ", scaled(0.1, 8192, reference=256, optimizer="sgd"), "for 8192 images on 256 GPUs")

# %% [markdown]
# A rate without its batch says nothing. So `scaled` asks for the reference, and so does the loop:
# `--optim.reference_batch 256`. "Facebook validated the rule up to 8 GPUs" is too modest: Goyal et al. (2017) went to
# 8192 images on 256 GPUs, with warm-up, and found where it breaks.
#
# ## Warm-up and cosine
#
# A rate that is right later can be too high for a network that has just been made. Four blocks as in a transformer (add
# what a small network says, then normalise), Adam with a rate of 0.05. **Predict** the two curves:


# %%
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + self.inner(x))


# %%
def losses(warmup):
    torch.manual_seed(0)
    model, told = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 10)), []
    adam = torch.optim.Adam(model.parameters())
    for step in range(1, 91):
        adam.param_groups[0]["lr"] = rate(step, total=90, base=0.05, warmup=warmup)
        part = torch.randint(len(X), (128,))
        loss = F.cross_entropy(model(X[part]), Y[part])
        adam.zero_grad()
        loss.backward()
        adam.step()
        told.append(loss.item())
    return told


show.curves({"no warm-up": losses(0), "30 steps of warm-up": losses(30)}, "step", "training loss", log=True)

# %% [markdown]
# Look at the ends. Without warm-up the first steps are too long and throw the network to a place from which it does
# not come back; after 30 shorter ones the same rate does no harm. Not every network needs that: with plain layers
# instead of blocks you will see no difference. Large batches do, since their rate is high; Goyal et al. take 5 epochs.
#
# The rate is a **pure function of the step**: `rate(step, total, base, warmup)`, eight lines in
# `course_lib/train/schedule.py`. torch's schedulers count their own calls. So they must be saved, and stepped as often
# as their length was meant. A recipe says `CosineAnnealingLR(optimizer, T_max=100)`, and its loop has 300 steps.
# **Predict** the rate at step 200:

# %%
sgd = torch.optim.SGD(net().parameters(), lr=0.4)
cosine, rates = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=100), []
for _ in range(300):
    rates.append(cosine.get_last_lr()[0])
    sgd.step()
    cosine.step()
ours = [rate(step, 300, base=0.4, warmup=30) for step in range(1, 301)]
show.curves({"T_max=100, 300 steps": rates, "rate(step, 300, 0.4, warmup=30)": ours}, "step", "learning rate")

# %% [markdown]
# At step 200 it is at its highest again. (The other mistake is `T_max` in steps and `step()` once an epoch: then it
# hardly comes down.) And it has no warm-up.
#
# ## Clipping
#
# A gradient that is longer than `max_norm` is shortened: the norm of *all* parameters together, so that its direction
# stays. Of which gradient? A text says: clip before backward, because then local gradients are clipped before they are
# averaged. **Predict:** which norm is found there? And does the average of clipped gradients have the right direction?


# %%
def clipped():
    model = NaiveDDP(net())
    x, y = X[dist.get_rank() :: 3][:32], Y[dist.get_rank() :: 3][:32]
    loss = F.cross_entropy(model(x), y) * (30 if dist.get_rank() == 1 else 1)  # a rank with hard samples
    before = clip_grad_norm_(model.parameters(), 0.1).item()
    loss.backward()
    local = parameters_to_vector(p.grad for p in model.parameters())
    model.synchronize()
    average = parameters_to_vector(p.grad for p in model.parameters())
    local_first = local * (0.1 / local.norm()).clamp(max=1)
    dist.all_reduce(local_first)
    return before, (local_first / 3).norm().item(), F.cosine_similarity(local_first, average, dim=0).item()


before, norm, cosine = run(clipped, ranks=3).results[0]
print(f"before backward: norm {before}   clipped, then averaged: norm {norm:.3f}, cosine to the average {cosine:.2f}")

# %% [markdown]
# Before backward there is nothing to clip. Clipping each rank's own gradient keeps the norm of the average below
# `max_norm`, as the text hopes (a mean cannot be longer than the longest). So nothing explodes, but it points
# elsewhere: the rank with the hard samples counts no more than the others. With torch's DDP the average is made inside
# backward, so after `loss.backward()` you have the right gradient.
#
# ## Sixteen bits
#
# In **mixed precision** (AMP) the forward computes in 16 bits; weights, gradients and what is sent stay float32 (lesson
# 07 has counted the bytes). bf16 has the range of float32 and needs nothing else. fp16 ends at 65504 and at 6e-8.
# **Predict** what is left of these gradients, without and with a factor of 65536:

# %%
gradients = torch.tensor([3e-9, 2e-8, 1e-5, 0.1, 3.0])
print("fp16        ", gradients.half().tolist())
print("bf16        ", gradients.bfloat16().tolist())
print("fp16, scaled", ((gradients * 65536).half().float() / 65536).tolist())

# %% [markdown]
# That is what a `GradScaler` is for: it multiplies the loss, so that small gradients survive, and divides before the
# step. What is too large now becomes infinite. Then the step is skipped and the factor halved; after 2000 good steps it
# is doubled. Six calls, and only one order is right:
#
# ```python
# scaler.scale(loss).backward()     # DDP averages in here
# scaler.unscale_(optimizer)        # divides, and looks for inf and nan
# clip_grad_norm_(parameters, 1.0)  # real lengths now
# scaler.step(optimizer)            # or not, if something was infinite
# scaler.update()                   # halves or doubles the factor
# optimizer.zero_grad()             # many snippets forget it
# ```
#
# Clipping without `unscale_` is common. **Predict** how long the step of SGD with rate 1 and `max_norm` 0.1 is then:


# %%
def step_length(unscale):
    model, scaler = net(), torch.amp.GradScaler("cpu")
    sgd, start = torch.optim.SGD(model.parameters(), lr=1.0), parameters_to_vector(model.parameters()).detach()
    scaler.scale(F.cross_entropy(model(X[:64]), Y[:64])).backward()
    if unscale:
        scaler.unscale_(sgd)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(sgd)
    return (parameters_to_vector(model.parameters()).detach() - start).norm().item()


print(f"with unscale_: {step_length(True):.4f}   without: {step_length(False):.7f}")

# %% [markdown]
# 65536 times too short: the network seems to learn nothing, and nothing complains. (An older spelling,
# `torch.cuda.amp.GradScaler`, still works, and warns:)

# %%
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.amp.GradScaler(enabled=False)
print(caught[0].category.__name__, "-", str(caught[0].message)[:90])

# %% [markdown]
# ### An overflow on one rank
#
# Three ranks, four steps. In step 2 the gradients of rank 1 overflow, only there. `local`: each rank unscales its own
# gradients and averages afterwards. `together`: average first. **Predict:** who steps, and what are the factors then?


# %%
def with_overflow(order):
    model, scaler = NaiveDDP(net()), torch.amp.GradScaler("cpu")
    sgd, sums, factors = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(1, 5):
        part = torch.arange(dist.get_rank(), 192, 3)
        loss = F.cross_entropy(model(X[part]), Y[part]) * (1e38 if step == 2 and dist.get_rank() == 1 else 1)
        sgd.zero_grad()
        scaler.scale(loss).backward()
        if order == "local":
            scaler.unscale_(sgd)
        model.synchronize()
        if order == "together":
            scaler.unscale_(sgd)
        scaler.step(sgd)
        scaler.update()
        sums.append(round(parameters_to_vector(model.parameters()).sum().item(), 3))
        factors.append(round(scaler.get_scale()))
    return sums, factors


for order in ("local", "together"):
    for rank, (sums, factors) in enumerate(run(with_overflow, ranks=3, args=(order,)).results):
        print(f"{order:<9} rank {rank}: sum of the weights {sums}   factor {factors}")

# %% [markdown]
# `local`: in step 2 rank 1 found its infinity and skipped. Ranks 0 and 2 had looked at fine gradients of their own; the
# average brought them the infinity, and they stepped with it. Their weights are nan from here on, and with the next
# average so are those of rank 1. In step 3 the ranks even average gradients that were multiplied by different factors.
#
# `together`: an infinity survives every sum. After the average it is on all ranks, all skip, and all halve. That is
# why with DDP no message about the overflow is needed, and why the factors stay equal on all ranks. "`scale()` lets the
# scale factor take part in the all-reduce" can be read, but only gradients are reduced. Where ranks hold *different*
# gradients (lesson 12), they must agree by a message: `ShardedGradScaler` does, and the course's loop uses it.
#
# A rank that finds an infinity must not simply leave the step. **Predict** what the others do if it does, in front of
# the average. (You have seen it in lesson 08: they wait.)
#
# ## BatchNorm sees its rank only
#
# Statistics are made of the samples *of one rank*. **Predict:** 32 samples on one process, and the same 32 on 4 and 16
# ranks of 8 and 2. How far is the averaged gradient from that of one process?


# %%
def with_norm(model, ranks):
    """The mean over `ranks` shares of 32 samples: what DDP would have."""
    grads = []
    for share in range(ranks):
        model.zero_grad()
        F.cross_entropy(model(X[share:32:ranks]), Y[share:32:ranks]).backward()
        grads.append(parameters_to_vector(p.grad for p in model.parameters()))
    return sum(grads) / ranks


for name, layer in (("BatchNorm", nn.BatchNorm1d(32)), ("LayerNorm", nn.LayerNorm(32))):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), layer, nn.ReLU(), nn.Linear(32, 10))
    one, four, many = (with_norm(model, ranks) for ranks in (1, 4, 16))
    print(f"{name}: 4 x 8 is off by {(four - one).norm() / one.norm():.0%}, 16 x 2 by "
          f"{(many - one).norm() / one.norm():.0%}")  # fmt: skip

# %% [markdown]
# That is no fault of DDP: other statistics are another model. So the number of samples *on a rank* is a part of the
# recipe; Goyal et al. keep 32 on each GPU, whatever the size of the run. With very few, `SyncBatchNorm` shares the
# statistics over all ranks (on GPUs only), or take a norm that looks at one sample at a time, as LayerNorm does.
#
# One more line of the recipe: **weight decay** is for matrices. Biases and the scales of norms are left out
# (`--optim.decay matrices`):

# %%
for group in decay_groups(model.parameters(), weight_decay=1e-4, everything=False):
    print(group["weight_decay"], [list(p.shape) for p in group["params"]])

# %% [markdown]
# ## All of it in the loop
#
# The course's loop has each of these as an option, and says before its first step what follows from them ("the plan",
# below the bar).
# **Predict** the peak of the rate: 0.05 for 32 samples, and a global batch of 128.

# %%
options = {"data.global_batch": 128, "optim.lr": 0.05, "optim.reference_batch": 32, "optim.clip": 1.0}
t = train("digits", ranks=2, **options, **{"optim.epochs": 2, "optim.decay": "matrices", "amp.dtype": "bf16"})

# %%
print("highest rate:", round(max(row["lr"] for row in t.rows("train")), 4))
show.loss(t)

# %% [markdown]
# Two files hold what this lesson was about: `course_lib/train/schedule.py` and `course_lib/train/update.py`.
#
# ## In three lines
#
# - A rate belongs to a global batch: in proportion for SGD, about the square root for Adam, with warm-up, as a pure
#   function of the step.
# - backward, average, unscale, clip, step or skip, update the factor. In this order all ranks see the same infinity.
# - Clip the average by the norm of all parameters together; mind BatchNorm when a rank has few samples.
#
# ## On A100s
#
# The recipe `resnet50-a100` takes 0.1 for 256 images: 8 GPUs with 256 each make 2048 and a peak of 0.8, after 5 epochs
# of warm-up, with bf16, no decay on vectors and label smoothing. NVIDIA's published run on a DGX A100 80GB
# (DeepLearningExamples, 21.03) trains 90 epochs with AMP in about 3 hours, to 77.12 ± 0.11 % top-1, and mixed precision
# makes one GPU 2.6 times as fast (2470 against 938 images a second).
#
# ## Exercise
#
# [Exercise 09: recipe](../exercises/09_recipe/09_recipe.ipynb) The rate of a step, and the order of an update. About 40
# minutes.
