# %% [markdown]
# # Exercise 09: recipe
#
# **Difficulty** easy, then medium · **Time** 15 and 25 minutes · **You write** about 6 and 7 lines · **Points** 5 and 7
#
# ## 1. The learning rate of a step
#
# **Goal.** `learning_rate(step, total, warmup, base, reference, batch, ranks, optimizer)` returns the rate of one step,
# as a pure function: no counter, no state, so a resumed run cannot be off by one.
#
# | | |
# |---|---|
# | step | 1, 2, … `total` |
# | peak | `base` is right for `reference` samples a step; `batch` is the number of *one rank* |
# | | sgd: in proportion to the global batch; adamw: by the square root |
# | warm-up | step k of the first `warmup` steps has k / `warmup` of the peak |
# | then | half a cosine: at its top at step `warmup`, it would reach 0 one step *after* the last one |
# | edges | no warm-up (then the first step has the peak), one step in all, all warm-up |
#
# For example 8 ranks with 64 images each, 0.1 for 256: a peak of 0.2 for sgd, 0.1414 for adamw.

# %%
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from course_lib import check, run, show
from course_lib.parallel.naive import NaiveDDP


# %% solution="learning_rate"
def learning_rate(step, total, warmup, base, reference, batch, ranks, optimizer):
    """The rate of step 1..total. optimizer: "sgd" or "adamw"."""
    # about 6 lines: the ratio of the batches, the peak, the line, the cosine
    ### BEGIN SOLUTION
    ratio = batch * ranks / reference
    peak = base * (ratio if optimizer == "sgd" else math.sqrt(ratio))
    if step <= warmup:
        return peak * step / warmup
    start = max(warmup, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - start) / (total + 1 - start)))
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# Look at three places: the first step is not 0, there is one peak at step 10 without a jump beside it, and the last
# step is small and not 0.

# %% tags=["show"]
curves = {}
for optimizer, ranks in (("sgd", 4), ("sgd", 8), ("adamw", 8)):
    rates = [learning_rate(step, 100, 10, 0.1, 256, 64, ranks, optimizer) for step in range(1, 101)]
    curves[f"{optimizer}, {ranks} ranks of 64"] = rates
show.curves(curves, "step", "learning rate")

# %% graded="check_learning_rate" points=5
check.learning_rate(learning_rate)

# %% [markdown]
# ## 2. The order of an update
#
# **Goal.** `update(model, optimizer, scaler, loss, max_norm)` makes one update, or skips it. All ranks call it with
# their own loss. `model.synchronize()` averages the gradients over the ranks, as your `NaiveDDP` does (torch's DDP does
# that inside of backward); `scaler` is a `torch.amp.GradScaler`.
#
# | | |
# |---|---|
# | gradient | the average of all ranks' gradients, with none of the scaler's factor in it |
# | clipped | to `max_norm`, all parameters together, if it is longer; `clip_grad_norm_` does that |
# | overflow | a gradient is infinite on *one* rank: *no* rank steps, and the factor is halved on all |
# | afterwards | all ranks have the same weights and the same factor; nothing of this update is in the next one |
#
# **The plan.** Seven calls, one line each. You need `zero_grad`, `scale(loss).backward`, `synchronize`, `unscale_`,
# `clip_grad_norm_`, `scaler.step` and `scaler.update`. Only the order is in question.
#
# **A hint.** `scaler.unscale_(optimizer)` divides the gradients by the factor and looks for inf and nan *in what this
# rank has then*. `scaler.step` skips if it found one, and `scaler.update` halves the factor.


# %% solution="update"
def update(model, optimizer, scaler, loss, max_norm):
    """One update of all ranks together, or none."""
    # about 7 lines
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    model.synchronize()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# Three ranks, eight updates. In the third one the loss of rank 1 is so large that its gradients overflow. Each row is
# a rank: one of its weights after each update. All rows must be equal, and the third number the same as the second.


# %% tags=["show"]
def eight_updates():
    torch.manual_seed(dist.get_rank())
    model = NaiveDDP(nn.Linear(6, 3))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu")
    weights = []
    for number in range(1, 9):
        loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,)))
        overflow = number == 3 and dist.get_rank() == 1
        update(model, optimizer, scaler, loss * (1e38 if overflow else 1), 0.1)
        weights.append(round(model.module.weight[0, 0].item(), 4))
    return weights, scaler.get_scale()


for rank, (weights, factor) in enumerate(run(eight_updates, ranks=3).results):
    print(f"rank {rank}: {weights}  factor {factor:.0f}")

# %% [markdown]
# ### Check
#
# On 3 and 2 ranks, four updates each: one is clipped, one overflows on one rank, one is short enough, one is clipped.

# %% graded="check_update" points=7
check.update(update)

# %% [markdown]
# All ticks? The picture shows what three ranks said to each other: in each of four updates an all-reduce for each
# parameter, also in the second one, which was skipped. (The barriers are the check's.) No message about the overflow
# was needed: the infinity travels with the average.

# %% tags=["show"]
show.messages(check.update(update).run)
