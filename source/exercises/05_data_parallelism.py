# %% [markdown]
# # Exercise 05: data parallelism by hand
#
# **Difficulty** medium · **Time** 30 minutes · **You write** about 12 lines · **Points** 10
#
# N ranks train one model, each on its own part of every batch. After each step all of them must have the weights
# that one process on the whole batch would have.
#
# **Goal.** A module `NaiveDDP(module)` that a training loop uses like this:
#
# ```python
# model = NaiveDDP(module)
# loss = loss_fn(model(x), y)
# loss.backward()
# model.synchronize()              # now .grad is the mean over all ranks
# optimizer.step()
# ```
#
# | | |
# |---|---|
# | start | all parameters **and buffers** are those of rank 0, however the ranks were built and seeded |
# | each step | after `synchronize()` every `.grad` is the mean over the ranks |
# | result | equal to one process after *every* step (float64, relative error below 1e-10), same bits on all ranks |
# | sent | in a step one all-reduce a gradient (no flat tensor: that is exercise 06), nothing frozen, no barrier |
# | models | frozen parameters, tied weights, BatchNorm, branches that leave parameters out, any number of ranks |
#
# **Three traps**
#
# - A *frozen* parameter (`requires_grad=False`) never has a gradient: its `.grad` is None.
# - A parameter that this rank did not use in this step has `.grad` None as well. But another rank may have used it,
#   and waits for you: take part with zeros. (What no rank used may end as None or as zeros.)
# - A *tied* weight stands at two places of the model. `module.parameters()` gives it once.
#
# `dist.broadcast(tensor, src=0)` and `dist.all_reduce(tensor)` work in place. All ranks must call them in the same
# order.

# %%
import torch
import torch.distributed as dist
from torch import nn

from course_lib import check, run, show


# %% solution="NaiveDDP"
class NaiveDDP(nn.Module):
    """A module whose gradients are averaged over all ranks: one all-reduce for each, after backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        # about 4 lines: everybody gets what rank 0 has
        ### BEGIN SOLUTION
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, src=0)
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def synchronize(self):
        """Make each .grad the mean over all ranks. Called after backward, before the optimizer's step."""
        # about 6 lines
        ### BEGIN SOLUTION
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        ### END SOLUTION


# %% [markdown]
# ## See it run
#
# Two ranks, a model of four layers, three steps under the profiler. **Predict:** how many bars of communication will
# the last step have, and where will they be?


# %% tags=["show"]
def train():
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    model = NaiveDDP(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(128, 512)).square().mean().backward()
        model.synchronize()
        optimizer.step()


show.timeline(run(show.profiled(train), ranks=2))

# %% [markdown]
# Eight all-reduces, four large ones for the weights and four small ones for the biases, one after the other, and all
# of them *after* backward: while bytes travel, nobody computes. Exercise 06 changes that.
#
# ## Check
#
# The check trains five small models on three ranks: a plain one, one with BatchNorm, and one with each of the traps.
# Then one on two ranks, for more steps (how many differs each time), and one on a single rank. It compares every
# gradient and every weight after every step with one process on the whole batch.

# %% graded="check_naive_ddp" points=10
check.naive_ddp(NaiveDDP)
