# %% [markdown]
# # 05 · Data parallelism by hand
#
# **Afterwards you can** train one model on several ranks with a wrapper of twenty lines, prove after every step that
# it equals one process on the whole batch, and say what breaks that and what does not.
#
# **Time** 35 minutes to read; the cells run in about half a minute.

# %%
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from course_lib import run, show
from course_lib.launch import RunError

# %% [markdown]
# ## The idea
#
# Every rank has the *whole* model and a *part* of each batch. A gradient is linear in the loss, and the loss of a
# batch is the mean over its samples. So if all parts are of equal size,
#
# **gradient of the whole batch = mean over the ranks of the gradients of their parts.**
#
# **Predict:** twelve samples, as one batch and as three parts of four. How far is the mean of the three gradients
# from the gradient of the twelve: 10 %, 1 %, or nothing at all?


# %%
def net():
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def gradient(module, x, y):
    found = torch.autograd.grad(mse_loss(module(x), y), list(module.parameters()))
    return torch.cat([g.flatten() for g in found])


module, x, y = net(), torch.randn(12, 5).double(), torch.randn(12, 3).double()
parts = [gradient(module, x[k::3], y[k::3]) for k in range(3)]
(sum(parts) / 3 - gradient(module, x, y)).abs().max().item()

# %% [markdown]
# Nothing but rounding, in the last of sixteen digits. Data parallelism is no approximation. It is the same training,
# if you do two things:
#
# 1. **once**: all ranks get the same weights, those of rank 0;
# 2. **in each step**, between backward and the optimizer: the gradients become their mean over the ranks.
#
# Then every rank makes the same update, and the weights stay equal without ever being sent again.


# %%
class ByHand(nn.Module):
    """One all-reduce for each gradient, after backward."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.start()

    def start(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, x):
        return self.module(x)

    def synchronize(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# %% [markdown]
# ## The proof
#
# To prove it we train. Each rank has another seed, so the models *would* differ. With one rank the same function is
# the one process with the whole batch: it takes `x[0::1]`.


# %%
def train(wrap, make=net, optimizer=torch.optim.Adam):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1000 + rank)
    model, weights = wrap(make()), []
    optimizer = optimizer(model.parameters(), lr=0.01)
    for step in range(10):
        made = torch.Generator().manual_seed(step)  # all ranks make the same batch ...
        x, y = torch.randn(12, 8, generator=made, dtype=torch.float64).split([5, 3], dim=1)
        optimizer.zero_grad()
        mse_loss(model(x[rank::size]), y[rank::size]).backward()  # ... and take their part of it
        model.synchronize()
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(weights)


one = run(train, ranks=1, args=(ByHand,)).results[0]
by_hand = run(train, ranks=3, args=(ByHand,)).results
print("same bits on all ranks:", all(torch.equal(weights, by_hand[0]) for weights in by_hand))

# %% [markdown]
# Beside it we train four others:
#
# - torch's own `DistributedDataParallel` (DDP), which averages inside `backward()`;
# - ours without the broadcast at the start;
# - ours with the sum of the gradients where the mean should be;
# - a hook that is easily written: `register_post_accumulate_grad_hook(hook)`, where the hook averages its argument.
#   That argument is the *parameter*. So it averages weights, and no gradient ever.
#
# **Predict:** for each of them, how far is it from one process after one step, and after ten: rounding, a millionth,
# or more than a hundredth?


# %%
class TorchDDP(DistributedDataParallel):
    def synchronize(self):
        """Nothing is left to do."""


class NoBroadcast(ByHand):
    def start(self):
        pass


class Sum(ByHand):
    def synchronize(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)


# %%
class WrongHook(ByHand):
    def start(self):
        super().start()
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)

    def hook(self, grad):  # it is none
        with torch.no_grad():
            dist.all_reduce(grad)
            grad /= dist.get_world_size()

    def synchronize(self):
        pass


wrappers = {"by hand": ByHand, "torch DDP": TorchDDP, "no broadcast": NoBroadcast}
wrappers |= {"sum": Sum, "hook": WrongHook}
ranks = run(lambda: {name: train(wrap) for name, wrap in wrappers.items()}, ranks=3).results
found = {name: [rank[name] for rank in ranks] for name in wrappers}
show.difference(one, found)

# %% [markdown]
# Up is wrong; the grey band is rounding. *By hand* and *torch DDP* stay in the band at every step. The three others
# leave it at once. Without the broadcast each rank trains another model, with a gradient that belongs to none of
# them. The sum surprises many: with Adam its line is the lowest of the wrong ones, because Adam divides a constant
# factor out again (all but its ε). With SGD the same mistake multiplies the learning rate by N. So a test with only
# one optimizer, or one that looks whether "the loss falls", lets such mistakes pass:


# %%
def losses(wrap):
    torch.manual_seed(dist.get_rank())
    model, x = wrap(net()), torch.randn(64, 5, dtype=torch.float64)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(20):
        optimizer.zero_grad()
        loss = mse_loss(model(x), x[:, :3].sin())
        loss.backward()
        model.synchronize()
        optimizer.step()
        found += [loss.item()] * (step in (0, 19))
    return found


ranks = run(lambda: [losses(wrap) for wrap in wrappers.values()], ranks=2).results
for name, *found in zip(wrappers, *ranks, strict=True):
    print(f"{name:13}", *[f"{a:.3f} -> {b:.3f}  " for a, b in found])

# %% [markdown]
# The loss falls in all five. With SGD and a small rate it falls nearly alike when weights are averaged in place of
# gradients, and with the sum even faster, since the rate is twice as high. So compare weights, after every step, in
# float64, with ranks that are seeded differently, as the picture above does.
#
# ## What is not the same: BatchNorm
#
# **"N GPUs behave like one huge GPU."** Put BatchNorm into the model. **Predict:** does the proof still hold?


# %%
def with_norm():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


one_norm = run(train, ranks=1, args=(ByHand, with_norm)).results[0]
ranks = run(lambda: (train(ByHand, with_norm), train(TorchDDP, with_norm)), ranks=3).results
by_hand, by_torch = zip(*ranks, strict=True)
show.difference(one_norm, {"by hand": by_hand, "torch DDP": by_torch})

# %% [markdown]
# It does not, and torch's DDP is no better. BatchNorm normalises with the mean and variance of the samples that *it
# sees*: four on each rank, twelve in one process. The gradients are averaged all right, but of another function.
# `nn.SyncBatchNorm` computes the statistics over all ranks. It needs GPUs:


# %%
def synced():
    return nn.SyncBatchNorm(5)(torch.randn(4, 5)).shape


try:
    run(synced, ranks=1, quiet=True)
except RunError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Nor is *memory* pooled. **"DDP is the first choice for models that are too big for one card"** is wrong, too.
# **Predict:** this model has 147 parameters. After a step with Adam, which keeps two numbers for each: how many
# parameters, gradients and numbers of Adam does each of three ranks hold?


# %%
def held():
    model = TorchDDP(net())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 5).double()).sum().backward()
    optimizer.step()
    kept = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parameters = list(model.parameters())
    return [sum(t.numel() for t in tensors) for tensors in (parameters, [p.grad for p in parameters], kept)]


run(held, ranks=3).results

# %% [markdown]
# All of them, each rank. A model that does not fit on one GPU needs other means: FSDP, tensor or pipeline parallelism
# (lesson 12).
#
# ## Who does what: four sayings, run
#
# Each of these you can read. **Predict** for each: true or not?
#
# 1. "DDP synchronises the gradients *and updates the parameters*."
# 2. "`model.eval()` tells DDP not to synchronise."
# 3. "The API is the same as on one GPU."
# 4. "Call `init_process_group` right after the imports, before `model.to(device)`."


# %%
def who_updates():
    model = TorchDDP(net())
    mse_loss(model(torch.ones(4, 5).double()), torch.zeros(4, 3).double()).backward()
    if dist.get_rank() == 0:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return round(sum(p.sum().item() for p in model.parameters()), 6)


def in_eval_mode():
    model = TorchDDP(net()).eval()
    model(torch.ones(4, 5).double()).sum().backward()


first, second = run(who_updates, ranks=2).results
print("1. rank 0 called the optimizer, rank 1 did not; weights still equal:", first == second)
r = run(in_eval_mode, ranks=2)
print("2. all-reduces of rank 0 in eval mode:", sum(m.op == "all_reduce" for m in r.messages if m.rank == 0))

# %%
print("3. names in its state_dict:", run(lambda: list(TorchDDP(net()).state_dict())[:2], ranks=1).results[0])
try:
    DistributedDataParallel(net())  # here, in the notebook, is no process group; building the model needs none
except ValueError as error:
    print("4.", error)

# %% [markdown]
# 1. Wrong. The optimizer of *each* rank updates. The weights stay equal only because all do the same.
# 2. Wrong. `eval()` is for layers such as dropout and BatchNorm; the all-reduces belong to backward. (Lesson 07 has
#    `no_sync`.)
# 3. Nearly. The names have `module.` in front, because the model itself is `model.module`.
# 4. It must come before `DDP(model)`, no earlier: the wrapper is what talks.
#
# ## Is it faster?
#
# **"Near-linear scaling."** Two ranks share a batch of 256. **Predict:** how much faster is a step with two ranks
# than with one, with layers 64 wide, and with layers 512 wide?


# %%
def seconds_per_step(width, wrap=ByHand, samples=256, steps=10):
    if on_gpu := dist.get_backend() == "nccl":
        torch.cuda.set_device(dist.get_rank())
    with torch.device("cuda" if on_gpu else "cpu"):
        model = wrap(nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]))
        x, times = torch.randn(samples // dist.get_world_size(), width), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps + 3):
        loss = model(x).square().mean()
        loss.item()  # a GPU must have finished all that came before
        times.append(time.perf_counter())
        loss.backward()
        model.synchronize()
        optimizer.step()
        optimizer.zero_grad()
    return (times[-1] - times[2]) / steps  # the first two warm up


widths = (64, 512)
(one_rank,), two = (run(lambda: [seconds_per_step(width) for width in widths], ranks).results for ranks in (1, 2))
for k, width in enumerate(widths):
    slower = max(rank[k] for rank in two)
    print(f"{width:>4} wide: {one_rank[k] * 1e3:7.2f} ms with one rank, {slower * 1e3:7.2f} ms with two")

# %% [markdown]
# In which line do two ranks gain more, or lose less? Both models make eight all-reduces a step. The large one has 63
# times the bytes (4.2 MB of gradients) and 64 times the arithmetic. In the small one half of the batch saves little
# time, and each all-reduce costs its latency all the same (lesson 04). So neither the bytes nor the time to compute
# decides alone, but both together:
#
# **time with N ranks ≈ computing / N + communication that nobody hides.**
#
# Near-linear is what you get when the second term is small beside the first. Larger batches make it so: computing
# grows with the batch, gradients do not. And a part of it can be hidden: lesson 06. (The first term is computing / N
# only if every rank has a core for itself.)
#
# ## DataParallel is something else
#
# `nn.DataParallel` (DP) is older: *one* process with a thread for each GPU. On a CPU it only passes the call through:

# %%
dp = nn.DataParallel(module)
dp.device_ids, torch.equal(dp(x), module(x))

# %% [markdown]
# So the next lines are not run here; they are from its source, `torch/nn/parallel/data_parallel.py` and the files
# beside it. In **each forward** it cuts the batch (scatter), copies the model to every GPU (replicate), computes on
# all of them in threads (parallel_apply), and collects the outputs on the first one (gather).
#
# | what people say | what the source does |
# |---|---|
# | "DP computes forward on the main card" | on all cards; only the outputs are gathered on one |
# | "the loss is computed on the main card" | if it stands outside the module; inside `forward` every card has its own |
# | "gradients stay on the cards: clear them by hand" | backward sums them in the one module; `zero_grad` as always |
# | "DP is model parallelism" | it is data parallelism: every card gets the whole model, in every step anew |
# | "DDP cannot use several cards in a process" | a model whose layers lie on several cards can: `device_ids=None` |
#
# DDP has a process for each GPU: no shared interpreter, no copies of the model in each step, and it works on many
# nodes. The PyTorch documentation recommends it over DP on one machine, too.
#
# The next cell measures both where torch sees two GPUs: DP as one rank that has all of them, DDP with a rank for each.
# **Predict** which is faster, if yours has them.


# %%
class DP(nn.DataParallel):
    def synchronize(self):
        """Nothing is left to do: backward sums into the one module."""


if (gpus := torch.cuda.device_count()) < 2:
    print(f"Not measured here: that takes two GPUs, and torch sees {gpus}.")
else:
    for wrap, ranks in ((DP, 1), (TorchDDP, gpus)):
        times = run(seconds_per_step, ranks, args=(2048, wrap, 1024 * gpus), backend="nccl", watch=False).results
        print(f"{wrap.__name__:8} on {gpus} GPUs: {max(times) * 1e3:7.2f} ms a step")

# %% [markdown]
# ## In three lines
#
# - Broadcast parameters and buffers once; average gradients in each step; every rank updates by itself.
# - It equals one process on the whole batch, after every step, up to rounding; BatchNorm's statistics do not.
# - It saves time, not memory, and time only if a step computes much longer than it talks.
#
# ## On A100s
#
# NVIDIA's published ResNet-50 table for a DGX A100 80GB (DeepLearningExamples, 21.03, batch 256 a GPU, mixed
# precision): 2,470 images a second on one GPU, 16,621 on eight. The table gives 6.72 times as fast, not 8. With TF32,
# where each step computes longer, it gives 938 and 7,248, 7.72 times. (Both factors are NVIDIA's own. The quotients of
# these speeds are 6.73 and 7.73.)
#
# ## Exercise
#
# [Exercise 05: data parallelism by hand](../exercises/05_data_parallelism/05_data_parallelism.ipynb) Write the
# wrapper, for models with frozen parameters, tied weights and branches. About 30 minutes.
