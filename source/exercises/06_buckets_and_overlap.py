# %% [markdown]
# # Exercise 06: buckets and overlap
#
# **Difficulty** hard · **Time** 50 minutes · **You write** about 30 lines · **Points** 15
#
# The same as exercise 05, and faster: few large all-reduces in place of many small ones, and they travel while
# backward still computes.
#
# **Goal.** `BucketedDDP(module, bucket_mb)`, used as `NaiveDDP` was: `loss.backward()`, `model.synchronize()`,
# `optimizer.step()`.
#
# | | |
# |---|---|
# | buckets | from the last parameter to the first; `bucket_mb` MiB (2**20 bytes) at most, or one larger tensor |
# | sent | one all-reduce a bucket, of a flat tensor that holds its gradients and no more; nothing frozen, no barrier |
# | allowed | in a step one small all-reduce more, that tells what was used: 8 bytes a parameter at most |
# | when | as soon as the bucket's last gradient has come, and never before the buckets in front of it |
# | overlap | when backward has its last gradient, all but the last bucket are under way |
# | waiting | nobody waits inside backward; `synchronize()` waits for everything |
# | result | equal to one process after every step, the same bits on all ranks, any number of ranks |
# | models | frozen, tied or unused parameters; layers used in another order than they stand in; one dtype in all |
#
# **The plan**
#
# 1. *Fill the buckets*, once. Begin a new one when the next gradient does not fit any more.
# 2. *Count*: `parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` in each backward, when
#    `parameter.grad` is complete. When the last gradient of a bucket has come, the bucket is full. (A lambda in a loop
#    looks up the loop's variable when it is called, and finds its last value. `lambda _, number=number: ...` keeps it.)
# 3. *Start* full buckets, in order: `handle = dist.all_reduce(flat, async_op=True)`. All ranks must start the same
#    buckets in the same order. So bucket 1 never starts before bucket 0, even if it is full first.
# 4. *Synchronize*: start what has not started, because a parameter was not used (its gradient counts as zero). Wait
#    for each handle, divide, give the gradients back. Then begin counting anew.
#
# Use `torch.cat` to make a flat tensor, and `flat.split(sizes)` with `view_as` to take it apart.

# %%
import torch
import torch.distributed as dist
from torch import nn

from course_lib import check, run, show


# %% solution="BucketedDDP"
class BucketedDDP(nn.Module):
    """A module whose gradients are averaged over all ranks, in buckets, while backward computes."""

    def __init__(self, module, bucket_mb):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, src=0)
        # about 12 lines: the buckets (lists of parameters), the counters, and hooks that call `arrived`
        ### BEGIN SOLUTION
        self.buckets, filled = [], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            nbytes = parameter.numel() * parameter.element_size()
            if not self.buckets or filled + nbytes > bucket_mb * 2**20:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(parameter)
            filled += nbytes
        self.begin_again()
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self.arrived(number))
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def arrived(self, number):
        """Backward has completed one more gradient of bucket `number`."""
        # about 8 lines: count, and start what is full
        ### BEGIN SOLUTION
        self.missing[number] -= 1
        while len(self.flats) < len(self.buckets) and self.missing[len(self.flats)] == 0:
            self.start()

    def start(self):
        bucket = self.buckets[len(self.flats)]
        self.flats.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket]))
        self.handles.append(dist.all_reduce(self.flats[-1], async_op=True))

    def begin_again(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.flats, self.handles = [], []
        ### END SOLUTION

    def synchronize(self):
        """Make each .grad the mean over all ranks. Called after backward, before the optimizer's step."""
        # about 8 lines
        ### BEGIN SOLUTION
        while len(self.flats) < len(self.buckets):
            self.start()
        for bucket, flat, handle in zip(self.buckets, self.flats, self.handles, strict=True):
            handle.wait()
            flat /= dist.get_world_size()
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        self.begin_again()
        ### END SOLUTION


# %% [markdown]
# ## See it run
#
# The model of exercise 05: four layers of 1 MiB. **Predict** for buckets of 1.5 MiB: how many all-reduces, and which
# of them begin before backward ends?


# %% tags=["show"]
def train(bucket_mb):
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    model = BucketedDDP(nn.Sequential(*layers), bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(128, 512)).square().mean().backward()
        model.synchronize()
        optimizer.step()


show.timeline(run(show.profiled(train), ranks=2, args=(1.5,)))

# %% [markdown]
# Four bars of communication, and the first three begin beside the green of backward: a bucket goes when it is full,
# not when all are. Try 0.1 and 100 MiB: what do you gain, and what do you lose?
#
# ## Check
#
# The check trains a deep model and four with traps on three ranks, and looks at every gradient, at the size of
# every all-reduce, and at when it began. In two cases a rank is late on purpose: who waits for it inside backward is
# found out. In one of these, on two ranks, a layer is left out in one step: in the next one all buckets must begin in
# time again. On a single rank you may send nothing.

# %% graded="check_bucketed_ddp" points=15
check.bucketed_ddp(BucketedDDP)
