# %% [markdown]
# # Exercise 12: memory and beyond
#
# **Difficulty** medium · **Time** 30 and 25 minutes · **You write** about 20 and 20 lines · **Points** 8 and 6
#
# ## 1. ZeRO-1 by hand
#
# **Goal.** A class `ZeroOne(params, make_optimizer)` that a training loop uses in place of an optimizer. The model is
# not wrapped, and all ranks begin with the same weights:
#
# ```python
# zero = ZeroOne(model.parameters(), lambda params: torch.optim.Adam(params, lr=0.01))
# loss_fn(model(x), y).backward()  # each rank on its own samples
# zero.step()                      # averages gradients, updates the weights on all ranks
# zero.zero_grad()
# ```
#
# | | |
# |---|---|
# | weights | after each step those of *one* process with the whole optimizer and the mean of the ranks' gradients |
# | | (float64, relative error below 1e-10), and the same bits on all ranks |
# | kept | Adam keeps 150 numbers for 75 weights. With four ranks each keeps about 38 |
# | sent | in a step one reduce-scatter of the gradients and one all-gather of the weights |
# | | over a ring that is 2(N-1)/N·M bytes, no more than the all-reduce of DDP |
# | models | frozen parameters, tied weights, any number of weights, any number of ranks |
# | optimizer | any that treats each number by itself. Which one is for `make_optimizer` to say |
#
# **The plan.** Join all weights into one flat tensor. Append zeros, so that it can be cut into N equal parts. Rank r
# owns the r-th part: a tensor of its own, the only one that its optimizer knows. In a step
#
# ```
# gradients   [ part 0 | part 1 | part 2 ]     reduce-scatter: rank r gets the sum of all parts r
#                  |        |        |         divide by N; each optimizer updates its part
# weights     [ part 0 | part 1 | part 2 ]     all-gather: all ranks get all parts, and write them into the model
# ```
#
# - `dist.reduce_scatter_single(output, input)` and `dist.all_gather_single(output, input)` do the two. (Other code has
#   `reduce_scatter_tensor` and `all_gather_into_tensor`: older names of the same, of which torch 2.14 warns.)
# - An optimizer takes a plain tensor as a parameter, and reads its `.grad`.
# - `params` may be a generator: it can be gone through once.
# - A parameter that this rank did not use has `.grad` None. Its place in the flat tensor must stay: put zeros there.
# - `torch.cat` makes a copy. The model does not change by what you do to it.

# %%
import torch
import torch.distributed as dist
from torch import nn

from course_lib import check, run, show
from course_lib.parallel import pipeline_schedule


# %% solution="ZeroOne"
class ZeroOne:
    """An optimizer that averages gradients over all ranks, and keeps on each the state of one part of the weights."""

    def __init__(self, params, make_optimizer):
        # about 4 lines: this rank's part of the weights, and an optimizer for it
        ### BEGIN SOLUTION
        self.params = [p for p in params if p.requires_grad]
        self.ranks = dist.get_world_size()
        self.part = self.joined(self.params).chunk(self.ranks)[dist.get_rank()].clone()
        self.optimizer = make_optimizer([self.part])
        ### END SOLUTION

    def joined(self, tensors):
        """All tensors side by side, and zeros at the end, so that it can be cut into a part for each rank."""
        # about 3 lines
        ### BEGIN SOLUTION
        flat = torch.cat([t.detach().flatten() for t in tensors])
        padding = flat.new_zeros(-len(flat) % self.ranks)
        return torch.cat([flat, padding])
        ### END SOLUTION

    def step(self):
        """Average the gradients, update all weights on all ranks."""
        # about 11 lines: reduce-scatter, update, all-gather, write into the parameters
        ### BEGIN SOLUTION
        gradients = self.joined([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        self.part.grad = torch.empty_like(self.part)
        dist.reduce_scatter_single(self.part.grad, gradients)
        self.part.grad /= self.ranks
        self.optimizer.step()
        weights = torch.empty_like(gradients)
        dist.all_gather_single(weights, self.part)
        at = 0
        for p in self.params:
            p.data.copy_(weights[at : at + p.numel()].view_as(p))
            at += p.numel()
        ### END SOLUTION

    def zero_grad(self):
        """Let go of the model's gradients."""
        # about 2 lines
        ### BEGIN SOLUTION
        for p in self.params:
            p.grad = None
        ### END SOLUTION


# %% [markdown]
# ### See it run
#
# Three ranks, three steps, 233 weights of 4 bytes. **Predict:** how many numbers does Adam keep on each rank, and how
# many bytes does a rank put into each of its two messages?


# %% tags=["show"]
def three_steps():
    torch.manual_seed(0)
    model, made = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 2)), []

    def adam(params):
        made.append(torch.optim.Adam(params))
        return made[-1]

    zero = ZeroOne(model.parameters(), adam)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(16, 8)).square().mean().backward()
        zero.step()
        zero.zero_grad()
    kept = sum(t.numel() for state in made[0].state.values() for t in state.values() if t.ndim)
    return kept, model[0].weight[0, 0].item()


r = run(three_steps, ranks=3)
for rank, (kept, weight) in enumerate(r.results):
    print(f"rank {rank}: Adam keeps {kept} numbers here; the first weight is {weight:.6f}")
show.messages(r)

# %% [markdown]
# In one process it would be 466 numbers. Six collectives, two in a step, where DDP has one: step through them with the
# arrow keys, and look at the bytes.
#
# ### Check
#
# Plain models on four, two and one ranks, tied weights on four, frozen ones and branches that leave parameters out on
# three; SGD, SGD with momentum, Adam. Weights after every step, what each optimizer keeps, and what is sent.

# %% graded="check_zero_one" points=8
check.zero_one(ZeroOne)

# %% [markdown]
# ## 2. A pipeline's bubble
#
# The formula of the lesson, (P - 1) / (M + P - 1), is for stages that are equally long. Yours hardly ever are: one has
# the embedding, another one the loss. So you find out when each op starts.
#
# **Goal.** `timeline(schedule, forward, backward)` returns all ops as spans `(stage, kind, start, end)`, as in exercise
# 11, in microseconds from 0 on. `bubble(schedule, forward, backward)` returns the share of the time in which stages
# wait: from 0, when the first op starts, until the last one ends, of all stages together. It is a number from 0 to 1.
#
# | | |
# |---|---|
# | `schedule[stage]` | its ops, each a kind and a microbatch, in order: `[("forward", 0), ("backward", 0), ...]` |
# | `forward[stage]`, `backward[stage]` | how long such an op takes on this stage |
# | a stage | does one op at a time, and keeps to its order |
# | forward of a microbatch | needs that of the stage *before* it, stage - 1 |
# | backward | needs that of the stage *behind* it, stage + 1 |
# | sending | takes no time |
#
# An op starts as soon as its stage is free and what it needs is there. Schedules are right: nobody waits for ever, and
# a stage's backward of a microbatch comes after its own forward. Any order may come, GPipe and 1F1B are but two.
#
# **A small one.** Two stages, two microbatches, `forward=[1, 3]`, `backward=[2, 2]`, by 1F1B:
#
# ```
#           0   1   2   3   4   5   6   7   8   9   10  11  12  13
# stage 0   [F0][F1]                [B 0  ]             [B 1  ]      works 6 of 13
# stage 1       [F 0      ][B 0  ]  [F 1      ][B 1  ]               works 10 of 13
# ```
#
# The bubble is 1 - 16 / 26 = 0.385. The formula says 0.333.
#
# **A hint.** You need the ends of ops that may not be known yet: backwards come from the last stage, forwards from the
# first. Keep for each stage what is left to do. Go through the stages again and again, and let each do as many of its
# ops as it can, until nothing is left.


# %% solution="bubble"
def timeline(schedule, forward, backward):
    """When each op runs: (stage, kind, start, end)."""
    # about 14 lines
    ### BEGIN SOLUTION
    todo, free, ends, spans = [list(ops) for ops in schedule], [0] * len(schedule), {}, []
    while any(todo):
        for stage, ops in enumerate(todo):
            while ops:
                kind, microbatch = ops[0]
                other = stage - 1 if kind == "forward" else stage + 1
                alone = not 0 <= other < len(schedule)
                if not alone and (other, kind, microbatch) not in ends:
                    break
                start = free[stage] if alone else max(free[stage], ends[other, kind, microbatch])
                free[stage] = start + (forward if kind == "forward" else backward)[stage]
                ends[stage, kind, microbatch] = free[stage]
                spans.append((stage, kind, start, free[stage]))
                ops.pop(0)
    return spans
    ### END SOLUTION


def bubble(schedule, forward, backward):
    """The share of the time in which stages wait."""
    # about 4 lines, from the timeline
    ### BEGIN SOLUTION
    spans = timeline(schedule, forward, backward)
    work = sum(end - start for _, _, start, end in spans)
    whole = max(end for *_, end in spans)
    return 1 - work / (len(schedule) * whole)
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# The small one, and then three stages of which the second is the slowest. A rank is a stage here. **Predict:** which
# schedule ends first? In the lesson, with equal stages, both ended at the same time.

# %% tags=["show"]
print(f"the small one: {bubble(pipeline_schedule.one_f_one_b(2, 2), [1, 3], [2, 2]):.3f}")
forward, backward = [1000, 2500, 1500], [2000, 4000, 3000]
gpipe, one_f_one_b = pipeline_schedule.gpipe(3, 4), pipeline_schedule.one_f_one_b(3, 4)
for name, schedule in {"GPipe": gpipe, "1F1B": one_f_one_b}.items():
    last = max(end for *_, end in timeline(schedule, forward, backward))
    print(f"{name:<5} ends after {last / 1000} ms, bubble {bubble(schedule, forward, backward):.3f}")
print(f"by the formula {pipeline_schedule.bubble(3, 4):.3f}")
show.spans(timeline(gpipe, forward, backward))

# %% tags=["show"]
show.spans(timeline(one_f_one_b, forward, backward))

# %% graded="check_bubble" points=6
check.bubble(bubble)
