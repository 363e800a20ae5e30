# %% [markdown]
# # Exercise 11: where time goes
#
# **Difficulty** medium · **Time** 25 and 20 minutes · **You write** about 15 and 15 lines · **Points** 6 and 6
#
# You get a trace: a list of `(rank, kind, start, end)`, in **micro**seconds, in no order. You find out where each
# rank's time went, and who makes all of them wait.
#
# | kind | |
# |---|---|
# | `"forward"`, `"backward"`, `"optimizer"` | something is computed. Spans may nest and overlap each other |
# | `"data"` | a batch is loaded, by the rank itself or, while it does something else, by a worker |
# | `"communication"` | a collective, from the moment when this rank calls it until it is done |
#
# ## 1. A table
#
# **Goal.** `where_time_goes(spans)` returns for each rank in the trace a dict with **milli**seconds:
#
# ```python
# {0: {"compute": 8.1, "exposed": 2.5, "data": 1.0, "idle": 0.4}, 1: {...}}
# ```
#
# The step goes from the first start to the last end of the whole trace, the same for all ranks (it may hold several
# optimizer steps). Each of its moments counts **once**, for the first line that fits:
#
# | | a moment in which this rank |
# |---|---|
# | `compute` | is in forward, backward or optimizer |
# | `exposed` | is in a communication |
# | `data` | loads data |
# | `idle` | does nothing that was recorded |
#
# So the four add up to the step. There may be one rank alone, without communication; ranks may begin at any number.
#
# **A small one.** Here is rank 0 of a trace of 10 ms:
#
# ```
# ms              0   1   2   3   4   5   6   7   8   9   10
# forward, ...            [-------]
#                                 [---------------]
#                                     [---]                    an operator inside of the other
# data            [-------]               [-----------]        a worker loads the next batch
# communication                           [-------]
#                                             [-----------]    a second bucket
# ```
#
# compute is 2 to 8, which makes 6 ms, not 7. Communication goes from 6 to 10; 8 to 10 is exposed: 2 ms. Data from 0
# to 2: 2 ms, as the worker is beside computing, and from 8 to 9 beside exposed communication. Idle 0.
#
# **A hint.** Sort the pieces by their start, and join those that touch: that is a union. And "communication, but not
# while computing" is as long as *both together* minus *computing*.

# %%
import time
from statistics import mean

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import check, run, show

COMPUTE = ("forward", "backward", "optimizer")


# %% solution="where_time_goes"
def where_time_goes(spans):
    """Milliseconds of each rank: {rank: {"compute": ..., "exposed": ..., "data": ..., "idle": ...}}."""
    # about 15 lines, with a function for the length of a union
    ### BEGIN SOLUTION
    step = max(end for *_, end in spans) - min(start for _, _, start, _ in spans)
    found = {}
    for rank in sorted({rank for rank, *_ in spans}):

        def length(*kinds, rank=rank):
            return union_length([(s, e) for r, kind, s, e in spans if r == rank and kind in kinds])

        compute = length(*COMPUTE)
        both = length("communication", *COMPUTE)
        busy = length("data", "communication", *COMPUTE)
        parts = {"compute": compute, "exposed": both - compute, "data": busy - both, "idle": step - busy}
        found[rank] = {part: us / 1000 for part, us in parts.items()}
    return found


def union_length(pieces):
    total, reached = 0, float("-inf")
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# The picture above as spans, and what you say to it. Then a trace of your own: three ranks, of which one has a habit.

# %% tags=["show"]
small = [(0, "forward", 2000, 4000), (0, "backward", 4000, 8000), (0, "backward", 5000, 6000)]
small += [(0, "data", 0, 2000), (0, "data", 6000, 9000)]
small += [(0, "communication", 6000, 8000), (0, "communication", 7000, 10000)]
print(where_time_goes(small))
show.spans(small)


# %% tags=["show"]
def steps(habit):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        if dist.get_rank() == 2 and habit == "sleeps":
            time.sleep(0.03)
        for _ in range(30 if dist.get_rank() == 1 and habit == "prepares its batches" else 1):
            x = torch.randn(256, 256)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def spans_of(run):
    """The last step of each rank, as this exercise has it."""
    spans = []
    for profile in run.results:
        for span in profile.compute + profile.communication:
            kind = span.kind if span.kind in COMPUTE else "communication"
            if span.start >= profile.steps[-1][0] and span.kind != "other":
                spans.append((profile.rank, kind, round(span.start * 1e6), round(span.end * 1e6)))
    return spans


sleeps = spans_of(run(show.profiled(steps), ranks=3, args=("sleeps",)))
for rank, parts in where_time_goes(sleeps).items():
    print(f"rank {rank}:", {part: round(ms, 1) for part, ms in parts.items()})
show.spans(sleeps)

# %% graded="check_where_time_goes" points=6
check.where_time_goes(where_time_goes)

# %% [markdown]
# ## 2. The thief
#
# **Goal.** `thief(spans)` returns `(rank, kind)`: who makes all the others wait, and of which kind is the time that it
# takes. The kind is `"compute"`, `"data"` or `"idle"`. Or it returns `None`, when no rank is to blame.
#
# 1. **Who?** The k-th communication of each rank, by its start, is the same collective. In it a rank waits from its own
#    start until the last rank's start. Add that up over all collectives. The suspect is the rank that waits **least**.
# 2. **How much?** The others *lose* as much as their exposed time, on average, is longer than the suspect's.
# 3. **Is it worth a word?** `None` when they lose less than a tenth of the step. `None`, too, when they lose less
#    than the suspect's own exposed time: then the network is the limit. And `None` for one rank alone.
# 4. **Why?** The kind of which the suspect has most *more* than the others on average.
#
# Not the rank with the longest communication: that one waits. No comparison in the check is a close one.


# %% solution="thief"
def thief(spans):
    """(rank, kind) of the rank that makes all wait, or None."""
    # about 15 lines, from the table above
    ### BEGIN SOLUTION
    table = where_time_goes(spans)
    if len(table) == 1:
        return None
    starts = {rank: [] for rank in table}
    for rank, kind, start, _ in sorted(spans, key=lambda span: span[2]):
        if kind == "communication":
            starts[rank].append(start)
    last = [max(calls) for calls in zip(*starts.values(), strict=True)]
    waiting = {rank: sum(last) - sum(calls) for rank, calls in starts.items()}
    suspect = min(waiting, key=waiting.get)
    others = [parts for rank, parts in table.items() if rank != suspect]
    more = {part: ms - mean(parts[part] for parts in others) for part, ms in table[suspect].items()}
    lost = -more.pop("exposed")
    if lost < 0.1 * sum(table[suspect].values()) or lost < table[suspect]["exposed"]:
        return None
    return suspect, max(more, key=more.get)
    ### END SOLUTION


# %% [markdown]
# ### See it run
#
# On your own trace: rank 2 sleeps, so it neither computes nor loads. In a second one rank 1 makes its batches itself,
# with operators, before forward. **Predict:** which kind is that? (A profiler knows nothing of data. It sees
# operators, and calls all before backward "forward"; who wants `"data"` in a trace marks it, with
# `torch.profiler.record_function`.)

# %% tags=["show"]
print("sleeps:              ", thief(sleeps))
prepares = spans_of(run(show.profiled(steps), ranks=3, args=("prepares its batches",)))
print("prepares its batches:", thief(prepares))
show.spans(prepares)

# %% graded="check_thief" points=6
check.thief(thief)
