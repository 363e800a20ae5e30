# %% [markdown]
# # 07 · torch's DDP
#
# **Afterwards you can** say what each knob of torch's `DistributedDataParallel` changes and what it costs, because you
# have measured it; accumulate gradients without paying for every microbatch, and with the right loss; and choose or
# write a comm hook.
#
# **Time** 40 minutes to read; the cells run in less than a minute.

# %%
from contextlib import nullcontext
from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import run, show
from course_lib.launch import RunError
from course_lib.parallel import hooks
from course_lib.parallel.ddp import DDPOptions, wrap

# %% [markdown]
# ## What it sends, and when
#
# You wrote such a wrapper in exercise 06: buckets in reverse order, all-reduced while backward goes on. torch's does
# the same in C++ (Li et al., *PyTorch Distributed*, 2020). `r.messages` holds its all-reduces, too. The barriers are
# there so that we can tell the steps apart.


# %%
def net(layers=8, width=512):
    torch.manual_seed(dist.get_rank())  # other weights on each rank: DDP sends those of rank 0 to all
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))


def steps(*ways):
    for knobs in ways:
        model = DistributedDataParallel(net(), **knobs)
        for _ in range(3):
            dist.barrier()
            model.zero_grad()
            model(torch.randn(8, 512)).square().mean().backward()


def sent(r, op="all_reduce"):
    """The bytes of each such call of rank 0, step by step."""
    found = []
    for m in r.messages:
        if m.rank == 0 and m.op == "barrier":
            found.append([])
        elif m.rank == 0 and m.op == op and found:
            found[-1].append(m.nbytes)
    return found


# %% [markdown]
# Eight layers of 512x512 have 8 MiB of gradients. **Predict:** how many all-reduces in the first step? In the second?

# %%
ways = ({}, {"bucket_cap_mb": 25}, {"bucket_cap_mb": 2})
found = [[f"{n / 2**20:.1f}" for n in step] for step in sent(run(steps, ranks=2, args=ways))]
for k, knobs in enumerate(ways):
    first, second, third = found[3 * k : 3 * k + 3]
    print(f"{knobs!s:<22} MiB in step 0: {first}, step 1: {second}, step 2: {third}")

# %% [markdown]
# Step 0 is one all-reduce of everything: DDP does not know yet in which order gradients arrive. It looks, and fills its
# buckets anew. From step 1 on, by default, the bucket that is full first holds 1 MiB, so that communication begins
# early, and the others 25. (A bucket is closed by the tensor that fills it, so it may hold more.) **An explicit 25 is
# not the default**: it holds for the first bucket, too. Measure from the second step on, always.
#
# **"NCCL fuses many small gradients into one all-reduce."** It was DDP: there is no NCCL here, it was gloo, and 16
# tensors made two messages. **"DDP waits until all gradients are ready."** That is step 0 only. **"It starts when *a
# gradient* is ready."** There would be 16 messages then: it starts when a *bucket* is full.
#
# **"Overlap means `gradient_as_bucket_view=True, static_graph=True`."** Here is a larger net with 4 MiB buckets and
# neither of the two, in its fourth step. **Predict:** when does the last all-reduce end, before or after `backward()`
# returns?


# %%
def profiled_steps():
    model = DistributedDataParallel(net(layers=4, width=1024), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(128, 1024)).square().mean().backward()
        optimizer.step()


show.timeline(run(show.profiled(profiled_steps), ranks=2))

# %% [markdown]
# Look at the green of "backward": the first all-reduces start while it goes on (dashed: waiting for a rank that is
# late). The last one starts when the first layer is done, and `backward()`, the black line above, does not return
# before it has ended. So the overlap is with the *same* backward. **"Communication overlaps with the next batch."**
# No: the optimizer needs the averages, and one that did not wait would step with old gradients. What overlap gains on
# your machine you have measured in lesson 06.
#
# ## The knobs
#
# **`gradient_as_bucket_view`.** DDP copies each gradient into its bucket, and the average back: gradients exist twice.
# With this knob `.grad` *is* a part of the bucket. We add up the memory behind the gradients and the buckets (a comm
# hook, more about it below, lets us see the buckets), and try what one may do with such a gradient.


# %%
def memory(knobs):
    model, found = DistributedDataParallel(net(), **knobs), {}

    def look(state, bucket):
        found[bucket.buffer().untyped_storage().data_ptr()] = bucket.buffer().untyped_storage().nbytes()
        return hooks.bf16_compress_hook(state, bucket)

    model.register_comm_hook(None, look)
    for _ in range(2):
        found.clear()
        model.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
    found |= {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    try:
        next(model.parameters()).grad.detach_()
        detached = "detach_() works"
    except RuntimeError as error:
        detached = str(error)[:72]
    return f"{sum(found.values()) / 2**20:.1f} MiB; {detached}"


views = ({}, {"gradient_as_bucket_view": True})
for view, found in zip(views, run(lambda: [memory(knobs) for knobs in views], ranks=2).results[0], strict=True):
    print(view, found)

# %% [markdown]
# One copy of all gradients less: for ResNet-50 that is 97.5 MiB on each rank. The price: `p.grad.detach_()` is an error
# then. (`zero_grad()` is fine, as you see: the steps call it.)
#
# **`find_unused_parameters`** lets a step leave parameters out. **`static_graph`** promises that every step uses the
# same ones. **`forward_sync_buffers`** (once `broadcast_buffers`) sends rank 0's buffers, such as BatchNorm's
# statistics, to all before each forward. And three things that people take for knobs: `model.eval()`,
# `torch.no_grad()` and autocast.
# **Predict** which of them change what is sent. (The lines show the bytes of each all-reduce in step 2, and of each
# broadcast in steps 1 and 2.)


# %%
def one_way(knobs, way):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(99, 99), nn.BatchNorm1d(99)), **knobs)
    model.train(way != "eval")
    for _ in range(3):
        dist.barrier()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = model(torch.randn(8, 99)).square().mean()
        if way != "no_grad":
            loss.backward()
    dist.barrier()  # the end of step 2


ways = [({}, ""), ({"find_unused_parameters": True}, ""), ({"static_graph": True}, "")]
ways += [({"forward_sync_buffers": False}, ""), ({}, "eval"), ({}, "no_grad"), ({}, "autocast")]
r = run(lambda: [one_way(*one) for one in ways], ranks=2, quiet=True)
for k, (knobs, way) in enumerate(ways):
    (_, first, second, _), reduced = sent(r, "broadcast")[4 * k : 4 * k + 4], sent(r)[4 * k + 2]
    print(f"{way or knobs or 'as it is'!s:<32} all-reduce {reduced!s:<14} broadcast {first}, {second}")

# %% [markdown]
# - `find_unused_parameters` costs one more all-reduce in each step, 4 bytes for each of the four parameters. Turn it on
#   only if a step may really leave some out.
# - `static_graph` does not change what is sent. (The two broadcasts of 20 and 4 bytes tell how the buckets are filled
#   anew: in step 1, with this knob in step 2, with `find_unused_parameters` in neither.) What it is for does not show
#   here: torch's documentation says that it finds unused parameters once for all steps, and allows more kinds of
#   activation checkpointing.
# - Without `forward_sync_buffers` no buffers are sent, and each rank keeps statistics of its own: then synchronise them
#   before you evaluate or save.
# - **"`model.eval()` tells DDP not to synchronise."** It does not: it is for dropout and BatchNorm. Without a backward,
#   as under `torch.no_grad()`, there are no gradients to send; but the forward of the wrapper still sends the buffers.
#   To evaluate, call the bare module, `model.module`.
# - **"Mixed precision halves the communication."** Not one byte: parameters, and so their gradients, stay float32
#   under autocast. Fewer bytes are the job of a hook.
#
# The **time limit** is no knob of DDP. It belongs to the process group: `dist.init_process_group(timeout=...)`. If
# nobody says otherwise, gloo's is this one:

# %%
print(dist.constants.default_pg_timeout)

# %% [markdown]
# ## Wrap last
#
# A web page says that `.to(...)` after wrapping raises an error. And one may want to unfreeze a layer after some
# epochs. **Predict:** two ranks, other data on each. Is the gradient of the first layer the same on both?


# %%
def wrap_then(change, wrapper):
    module = net(2)
    module[0].requires_grad_(change == "convert")
    model = wrapper(module)
    if change == "convert":
        model.to(torch.float64)
    module[0].requires_grad_(True)  # unfreezes it, where it was frozen
    model(torch.randn(8, 512, dtype=module[0].weight.dtype)).square().mean().backward()
    return module[0].weight.grad[0, :3].tolist()


for change in ("convert", "unfreeze"):
    r = run(wrap_then, ranks=2, args=(change, DistributedDataParallel))
    reduced = [m.nbytes for m in r.messages if m.op == "all_reduce" and m.rank == 0]
    print(change, *r.results, f"bytes of rank 0's all-reduces: {reduced}", sep="\n")

# %% [markdown]
# No error, and other gradients on each rank: DDP's hooks sit on the parameters as they were before. After the
# conversion nothing is averaged, after the unfreezing only the second layer (its weights and biases have 1,050,624
# bytes). From now on each rank trains a model of its own. The course's `wrap`, which the training loop of part 3 uses,
# is torch's DDP and looks at each parameter before each forward:

# %%
try:
    run(wrap_then, ranks=2, args=("unfreeze", lambda module: wrap(module, torch.zeros(1, 512))))
except RunError as error:
    print(error)

# %% [markdown]
# ## Accumulation
#
# A batch that does not fit into memory is cut into microbatches; their gradients add up in `.grad`. **"Gradient
# accumulation reduces communication."** With code that many pages show, which has no `no_sync`? **Predict** the number
# of all-reduces for four microbatches, in these four ways:


# %%
def four_microbatches(around_forward, around_backward):
    model = DistributedDataParallel(net(2))
    for _ in range(3):
        dist.barrier()
        for k in range(4):
            with model.no_sync() if k < 3 and around_forward else nullcontext():
                loss = model(torch.randn(8, 512)).square().mean() / 4
            with model.no_sync() if k < 3 and around_backward else nullcontext():
                loss.backward()


ways = ((False, False), (False, True), (True, False), (True, True))
found = sent(run(lambda: [four_microbatches(*around) for around in ways], ranks=2))
for (forward, backward), last in zip(ways, found[2::3], strict=True):  # the last step of each way
    print(f"no_sync around forward: {forward!s:<6} around backward: {backward!s:<6} all-reduces: {len(last)}")

# %% [markdown]
# Without `no_sync` there are two for each microbatch, one a bucket, as without accumulation. `no_sync` around backward
# alone does nothing, because DDP decides *in forward* whether this backward will be synchronised. So put **forward and
# backward** of all microbatches but the last inside. (Forward alone happens to be enough in this version; the
# documentation asks for both.)
#
# `static_graph` and `no_sync` do not go together. Here the very first backward is in `no_sync`:


# %%
def static_in_no_sync():
    model = DistributedDataParallel(net(2), static_graph=True)
    with model.no_sync():
        model(torch.randn(8, 512)).square().mean().backward()


try:
    run(static_in_no_sync, ranks=2)
except RunError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# An internal error of torch, and no word about the two (issue 143580 of pytorch).
#
# ### The right loss
#
# What should come out is the gradient of the mean over *all* samples, as if one process had them. Ranks and
# microbatches need not have equally many, as at the end of an epoch. Four recipes; **predict** which one is right.

# %%
SIZES = {"uneven": [[8, 8, 4], [8, 6, 1]], "equal": [[8, 8, 8], [8, 8, 8]]}  # samples of each microbatch, rank by rank
RECIPES = {
    "mean / microbatches": lambda losses, mine, total: losses.mean() / 3,
    "sum / samples of the rank": lambda losses, mine, total: losses.sum() / mine,
    "sum / all samples": lambda losses, mine, total: losses.sum() / total,
    "sum * ranks / all samples": lambda losses, mine, total: losses.sum() * dist.get_world_size() / total,
}


# %%
def gradient(batches, loss_of, zero_each):
    torch.manual_seed(0)
    model, mine = DistributedDataParallel(nn.Linear(6, 3)), batches[dist.get_rank()]
    total = torch.tensor(sum(len(y) for _, y in mine))
    dist.all_reduce(total)
    for k, (x, y) in enumerate(mine):
        if zero_each:
            model.zero_grad()
        with model.no_sync() if k < 2 else nullcontext():
            losses = F.cross_entropy(model(x), y, reduction="none")
            loss_of(losses, sum(len(y) for _, y in mine), total).backward()
    return model.module.weight.grad


def whole(batches):
    """One process that has all samples."""
    torch.manual_seed(0)
    module, (x, y) = nn.Linear(6, 3), (torch.cat(t) for t in zip(*batches[0], *batches[1], strict=True))
    F.cross_entropy(module(x), y).backward()
    return module.weight.grad


# %%
def all_recipes(batches):
    *_, last = RECIPES.values()
    return [gradient(batches, loss_of, False) for loss_of in RECIPES.values()] + [gradient(batches, last, True)]


names, off = [*RECIPES, "the same, zero_grad each time"], {}
for kind, sizes in SIZES.items():
    batches = [[(torch.randn(n, 6), torch.randint(3, (n,))) for n in of_rank] for of_rank in sizes]
    right, found = whole(batches), run(all_recipes, 2, (batches,)).results[0]
    off[kind] = [f"{(gradient - right).norm() / right.norm():.1%}" for gradient in found]
for name, uneven, equal in zip(names, *off.values(), strict=True):
    print(f"{name:<30} off by {uneven:>6} with uneven sizes, {equal:>6} with equal ones")

# %% [markdown]
# A mean of means gives the one sample at the end of rank 1 as much weight as eight others. Dividing by the rank's own
# number weighs ranks wrongly. The sum over all samples is right but for a factor, because DDP divides by the number of
# ranks. And **`zero_grad` in each microbatch** keeps the last microbatch only. When all sizes are equal, the first two
# are right as well, so a test with equal batches does not notice.
#
# ## Comm hooks
#
# A **comm hook** takes the place of DDP's all-reduce: `model.register_comm_hook(state, hook)`, one for a model. DDP
# calls `hook(state, bucket)` for each full bucket and waits for the Future that it returns. (torch has documented
# this since 1.8; pages that say it needs 2.0 are wrong.) In the course's `wrap` a hook has a name:
#
# | name | bytes that a rank puts in, for n float32 elements | whose |
# |---|---|---|
# | `none` | 4n | DDP's own all-reduce |
# | `fp16`, `bf16` | 2n | torch's |
# | `powersgd` | 4·rank·(rows + columns) of each large enough matrix, the rest 4n | torch's (Vogels et al. 2019) |
# | `onebit` | n/8, and 4 a parameter | ours, after Seide et al. 2014; yours has one scale a bucket |
# | `ring`, `shared` | 4n, over our own all-reduce | ours |
#
# `onebit` sends signs, and a scale: the mean absolute value. What that loses is kept and added to the next gradient
# (**error feedback**); PowerSGD does so, too.
#
# We train on the scanned digits of lesson 00, and look at one step more closely: how far is the average from the exact
# mean of the ranks' gradients? **Predict** the order of the errors, and of the losses after 40 steps.


# %%
def train_digits(images, labels, hook):
    torch.manual_seed(0)
    forgets = hook == "onebit, forgets"  # not a name that `wrap` knows
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    options = DDPOptions(comm_hook="none" if forgets else hook, powersgd_start=2)
    model, losses = wrap(module, images[:1], options), []
    if forgets:
        model.register_comm_hook(hooks.OneBit(feedback=False), hooks.onebit_hook)
    optimizer, random = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(40):
        dist.barrier()
        mine = torch.randint(len(images), (64,), generator=random)
        own = torch.autograd.grad(F.cross_entropy(module(images[mine]), labels[mine]), module.parameters())
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        averaged = [p.grad.flatten() for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([g.flatten() for g in own]).double(), torch.cat(averaged)


# %%
data = np.load(files("course_lib") / "data" / "digits.npz")
digits = torch.tensor(data["images"]).float().flatten(1) / 16, torch.tensor(data["labels"]).long()
tried, curves = ("none", "fp16", "bf16", "powersgd", "onebit", "onebit, forgets", "shared"), {}
r = run(lambda: [train_digits(*digits, hook) for hook in tried], ranks=2)
for k, hook in enumerate(tried):
    curves[hook], one, averaged = r.results[0][k]
    exact = (one + r.results[1][k][1]) / 2
    error = (averaged - exact).norm() / exact.norm()
    nbytes = sum(sum(sent(r, op)[40 * k + 38]) for op in ("all_reduce", "all_gather"))  # in its last step but one
    print(f"{hook:<16} {nbytes:>6} B a step   error {error:.1e}   last loss {np.mean(curves[hook][-5:]):.3f}")

# %% [markdown]
# `shared` shows 0 bytes because it does not use torch.distributed: its 38 kB travel through memory. The two 16-bit
# hooks halve the bytes, and to three digits the loss is that of `none`. PowerSGD and `onebit` are off by more than the
# whole gradient; and `onebit` is further off in this step than without its feedback. How can that train at all?

# %%
show.curves({name: curves[name] for name in ("none", "powersgd", "onebit", "onebit, forgets")}, "step", "training loss")

# %% [markdown]
# Look at the two lines of `onebit`. Both send one bit an element, and only the first one keeps what it could not send.
# So each of its steps brings old debts along, and is further from this step's mean. But nothing is lost: the sum of
# what was sent stays close to the sum of the gradients, and SGD adds them up anyway. Error feedback is one line; see
# how much it is worth. (What is left over is part of the state of training. A checkpoint without it resumes a little
# differently.)
#
# **"1-bit Adam or fp16 compression are DDP options."** fp16 is a hook of DDP. 1-bit Adam is an *optimizer* of
# DeepSpeed, which compresses its momentum after a warm-up; the hook here compresses gradients, for any optimizer.
#
# ### The price of 16 bits
#
# fp16 ends at 65504, and below 3e-8 it is zero. bf16 has the range of float32, with two to three digits. **Predict**
# the averages of 60000, 70000 and 2e-8, where both ranks bring the same gradient:


# %%
def averages(values):
    return {hook: [average_of(value, hook) for value in values] for hook in ("fp16", "bf16")}


def average_of(value, hook):
    model = wrap(nn.Linear(1, 1, bias=False), torch.zeros(1, 1), DDPOptions(comm_hook=hook))
    model(torch.tensor([[value]])).sum().backward()
    return model.module.weight.grad.item()


run(averages, ranks=2, args=((60_000.0, 70_000.0, 2e-8),)).results[0]

# %% [markdown]
# torch's fp16 hook converts first and divides by the number of ranks afterwards. So a gradient above 65504 is infinite
# before anything was added; dividing first would help here, but then small ones would vanish sooner. With a gradient
# scaler (lesson 09) infinite gradients skip the step. bf16 needs none of that.
#
# ### When is a hook worth it?
#
# When communication is what you wait for. A hook computes, too, and on a fast link that may cost more than the bytes it
# saves. All-gather hooks like 1-bit send N-1 times their bytes from each rank of a ring, an all-reduce less than 2
# times its own: at 64 ranks one bit sends as much as float32. `course bench hooks` in a terminal measures a training
# step with gloo's all-reduce beside the same step with our shared-memory hook, on your machine;
# [docs/hooks.md](../docs/hooks.md) has the table of another one. Lesson 14 makes the network slow, and hooks matter.
#
# ## In three lines
#
# - DDP all-reduces buckets while the same backward goes on; measure from the second step on, after it has filled them
#   anew. Wrap last.
# - Accumulate with `no_sync` around forward *and* backward of all microbatches but the last; the loss is the sum, times
#   the number of ranks, divided by the samples of all.
# - A comm hook trades bytes for error. 16 bits are nearly free, below that error feedback makes it work.
#
# ## On A100s
#
# ResNet-50 has 97.5 MiB of float32 gradients. DDP's paper (Li et al., VLDB 13(12), 2020) reports near-linear scaling
# on up to 256 GPUs. NVIDIA's published ResNet-50 run on a DGX A100 80GB
# (DeepLearningExamples, 21.03, batch 256 a GPU) makes 938 images a second on one GPU and 7248 on eight in TF32, 7.73
# times as many; with mixed precision 2470 and 16621, 6.73 times (its table says 7.72 and 6.72: digits cut off, not
# rounded). When computing gets 2.6 times as fast and gradients stay as large, communication weighs more.
#
# ## Exercise
#
# [Exercise 07: accumulate, and write a comm hook](../exercises/07_torch_ddp/07_torch_ddp.ipynb) About 55 minutes.
