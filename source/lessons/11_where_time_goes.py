# %% [markdown]
# # 11 · Where time goes
#
# **Afterwards you can** record a trace of your own run, name the rank and the reason when everybody waits, say how
# much of the communication is hidden, compute the MFU, and say after how many steps `torch.compile` has paid for
# itself.
#
# **Time** 35 minutes to read; the cells run in less than a minute.

# %%
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import schedule

from course_lib import run, show, train
from course_lib.train import flops

box = tempfile.TemporaryDirectory(prefix="where-time-goes-")  # it goes with the kernel
base = Path(box.name)

# %% [markdown]
# ## A window of a few steps
#
# A profiler writes down every operator. That is too much for a whole run, so one records a *window* of a few steps,
# after those that warm up. The loop does so with `--measure.profile_at`; each rank writes a file.
#
# The data set here is our own, with a fault in it that you will find later.

# %%
(base / "own.py").write_text("""
import os, time
import torch
from torch.utils.data import Dataset

class Noise(Dataset):
    def __len__(self):
        return 960

    def __getitem__(self, index):
        time.sleep(0.001 if os.environ["RANK"] == "1" else 0)
        return torch.full((1, 8, 8), index / 960), index % 10

def noise():
    return Noise(), Noise(), 10
""")
options = {"data.name": f"{base / 'own.py'}:noise", "optim.epochs": 2, "run.log_every": 5}
t = train(ranks=2, dir=base / "run", **options, **{"measure.profile_at": 20, "measure.profile_steps": 3})

# %%
for path in sorted((base / "run" / "traces").iterdir()):
    events = json.loads(path.read_text())["traceEvents"]
    print(path.name, "has", len(events), "events")
    for name in ("DistributedDataParallel.forward", "aten::convolution_backward", "gloo:all_reduce"):
        found = [event["dur"] / 1000 for event in events if event.get("name") == name]
        print(f"  {name:32} {len(found)} times, median {median(found):6.2f} ms")

# %% [markdown]
# The files are in Chrome's format: a name, a start `ts` and a length `dur` in *micro*seconds. Open them in
# [ui.perfetto.dev](https://ui.perfetto.dev), which sends nothing anywhere. You may read of TensorBoard's profiler
# tab; that plugin is gone. `nvprof`, in many older texts, does not work on an A100 and newer; NVIDIA's tool is
# `nsys`. Texts also tell you to look for `ncclAllReduce`; the operator is named `nccl:all_reduce`, its kernels
# `ncclDevKernel_AllReduce_…`, and here you see `gloo:all_reduce`.
#
# In a loop of your own you use torch's `schedule`. A line from many pages: `schedule(wait=1, warmup=1, active=3)`.
# **Predict** how many traces it makes in 100 steps:

# %%
for repeat in (0, 1):
    action = schedule(wait=1, warmup=1, active=3, repeat=repeat)
    saved = sum(action(step).name == "RECORD_AND_SAVE" for step in range(100))
    print(f"repeat={repeat}: {saved} traces in 100 steps")

# %% [markdown]
# Zero, the default, means *for ever*: the profiler never stops, and neither does what it costs. Say `repeat=1`.
#
# ## Who steals the time?
#
# In the trace above the all-reduce took far longer on one rank than on the other. **Predict:** is the network slow?
# Is it the fault of that rank? Look again at the data set, and at `RANK`.
#
# We plant the same thief in a loop where it is seen better: three ranks, of which one gets its batch late.


# %%
def steps(late=None, samples=64, width=256, count=6):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        if dist.get_rank() == late:
            time.sleep(0.03)  # a slow disk, a decoder, a worker too few
        x = torch.randn(samples, width)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def numbers(r):
    for t in show.overlap(r, steps=3):
        inside = f"in all-reduces {t.communication * 1e3:4.1f} ms, waiting there {t.waiting * 1e3:4.1f}"
        print(f"rank {t.rank}: step {t.step * 1e3:.1f} ms, {inside}; the others wait for it {t.kept * 1e3:4.1f}")


r = run(show.profiled(steps), ranks=3, args=(1,))
numbers(r)

# %% [markdown]
# **Steps are equally long on all ranks.** Comparing them accuses nobody. And the all-reduce is long on the *innocent*
# ranks: they came early, and wait inside. The thief has the **shortest** all-reduce, because when it comes all others
# are there. So "the rank with the longest collective is the slow one" names a victim. What names the slow rank is the
# time **before** the collective:

# %%
show.timeline(r)

# %% [markdown]
# Dashed is waiting. And the reason? Look at what the thief does before it comes. Here: nothing that an operator would
# show, so it is not computing; it waits for data. (A rank that computes longer, because its GPU is hot and slow or
# its samples are longer, would show a longer green or blue.)
#
# The course's loop measures that in each row without a profiler (`course_lib/train/pace.py`): each rank's own time,
# data and forward and backward, up to its last gradient. **Predict** for the first run, whose rank 1 is slow: what
# stands in `slowest_rank`? And would you have found it by `comm_share`?

# %%
row = t.rows("train")[-1]
for name in ("slowest_rank", "slowest_s", "others_s", "data_wait", "comm_share"):
    print(f"{name:12} {row[name]:.3g}")
said = (base / "run" / "output.log").read_text().splitlines()
print(*[line for line in said if "is slow" in line], sep="\n")

# %% [markdown]
# `comm_share` alone would have sent you to the network. `data_wait`, the mean over the ranks in seconds a step, says
# that data are a part of it; only the two times by rank say where to look.
#
# ### "The GPU is busy"
#
# Pages give limits: "utilisation should be above 90 %" (or 80, or 70). "Below 30 % while NCCL has 95 %: data
# loading." What `nvidia-smi` prints is the part of the time in which *some* kernel ran. NCCL's kernels **run while
# they wait**. We imitate that on a processor: a rank that asks again and again whether its all-reduce is done.
# **Predict:** how busy is the victim, how busy the thief?


# %%
def busy():
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(10):
        if dist.get_rank() == 1:
            time.sleep(0.03)
        handle = dist.all_reduce(torch.ones(1000), async_op=True)
        while not handle.is_completed():
            pass
    return (time.process_time() - used) / (time.perf_counter() - begin)


for rank, part in enumerate(run(busy, ranks=2).results):
    print(f"rank {rank}: busy {part:.0%} of the time")

# %% [markdown]
# The victim looks far busier than the thief, and nobody does anything useful. A high utilisation proves nothing.
# Judge by samples a second, by a trace, and by the MFU. (In `nvidia-smi dmon -s u` there are columns for sm, mem,
# enc, dec, not for transfers, as some pages say; PCIe is `-s t`.)
#
# ### Thieves that steal from all
#
# The slow rank is one kind. Others take from all ranks alike, so no rank stands out:
#
# - **`.item()` in each step**, for the progress bar. On a GPU it waits until all kernels before it are done, so the
#   processor cannot run ahead. Keep sums on the device and read them now and then, as `course_lib/train/meter.py`
#   does.
# - **Data slow everywhere**: `data_wait` is large, no rank is slowest. More workers.
# - **Too small a batch**: the bytes of an all-reduce do not depend on it, the computing does.
#
# ## Comm share, and what overlap hides
#
# **comm share = exposed communication / step**, where exposed means: nothing is computed beside it. **Predict** how
# the share changes from 16 to 1024 samples a rank, with the same model:

# %%
for samples in (16, 128, 1024):
    t0 = show.overlap(run(show.profiled(steps), ranks=2, args=(None, samples)), steps=3)[0]
    print(f"{samples:5} samples: step {t0.step * 1e3:6.2f} ms, communication {t0.communication * 1e3:5.2f} ms "
          f"({t0.share:4.0%} hidden), comm share {t0.exposed / t0.step:4.0%}, "
          f"{samples / t0.step:8,.0f} samples/s")  # fmt: skip

# %% [markdown]
# The all-reduces carry the same bytes each time. With a small batch the step has little else; beside a large one they
# are short, some of them hide behind backward, and each sample gets cheaper. Three cautions:
#
# - Intervals overlap, so **never add them up**. Two buckets under way at the same time are not twice the time, and
#   computing + communication is more than the step. Take the length of the *union*.
# - Communication includes waiting for a late rank. First rule out a thief, then blame the network.
# - Recording slows small steps down. Trust the shares of long steps, and measure speed without the profiler.
#
# ## MFU: which part of the machine do you use?
#
# **MFU = FLOPs of a sample · samples a second / peak** (Chowdhery et al. 2022). FLOPs are counted, not measured: a
# matrix product of (m, k) and (k, n) has 2·m·k·n. Forward once, backward about twice that. The peak is in a data
# sheet; for this machine we measure it: the best of some large products, on one thread.


# %%
def seconds(call, times=7):
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found[1:])  # disturbed least


def product(n):
    a = torch.randn(n, n)
    return 2 * n**3 / seconds(lambda: a @ a, times=15)


peak = max(product(n) for n in (256, 512, 1024))
print(f"peak: {peak / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} thread")

# %%
layers = [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
net = nn.Sequential(*layers)
counted = flops.count(net, (1, 28, 28))
parameters = sum(p.numel() for p in net.parameters())
print(f"{counted / 1e6:.2f} MFLOP a sample; 6 x parameters would be {6 * parameters / 1e6:.2f}")

# %% [markdown]
# Six for each parameter is the usual estimate: 2 forward, 4 backward. It is a little too high here, as the first
# layer needs no gradient for its input. **Predict** the MFU for 1, 16 and 256 samples:


# %%
def train_step(network, x):
    def step():
        network.zero_grad()
        network(x).square().mean().backward()

    return step


for samples in (1, 16, 256):
    per_step = seconds(train_step(net, torch.randn(samples, 784)))
    rate = samples / per_step
    print(f"{samples:4} samples: {rate:8,.0f} samples/s, MFU {counted * rate / peak:4.0%}")

# %% [markdown]
# A single sample moves all weights for one product each: memory and the cost of each call are the limit, and the
# processor waits while it looks busy. The MFU sees that. It also has no mercy: what is computed twice (activation
# checkpointing, lesson 12) counts once, and waiting counts as nothing. With `--measure.peak_tflops` the loop prints it
# in every row.
#
# ## torch.compile
#
# It turns Python into fewer, fused kernels. A chain of small operations goes through memory once instead of once
# each; a matrix product is a matrix product. **Predict:** which of the two gains, how long does compiling take, and
# after how many steps is it worth it?


# %%
class Chain(nn.Module):
    """Many small operations on each element, no matrix product."""

    def forward(self, x):
        for _ in range(3):
            x = x * torch.sigmoid(1.7 * x) + 0.1 * x
        return x


os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "kernels")  # an empty one
how = {"compile_threads": 1, "cpp.vec_isa_ok": True}  # no helpers, no test of the processor
x = torch.randn(512, 784, requires_grad=True)
for name, network in (("chain", Chain()), ("product", nn.Linear(784, 512, bias=False))):
    try:
        compiled = train_step(torch.compile(network, options=how), x)
        begin = time.perf_counter()
        compiled()
        first = time.perf_counter() - begin
    except RuntimeError as error:  # above all: there is no C++ compiler on this machine
        print(f"{name:8} cannot be compiled here: {str(error).strip().splitlines()[0]:.100}")
        continue
    plain, fast = seconds(train_step(network, x)), seconds(compiled)
    gain = f"pays after {first / (plain - fast):,.0f} steps" if fast < 0.9 * plain else "no clear gain"
    times = f"step {plain * 1e3:6.2f} ms, compiled {fast * 1e3:6.2f} ms, first step {first:5.1f} s"
    print(f"{name:8} {times}: {gain}")

# %% [markdown]
# (The first network also pays for what all share. The folder of kernels is new each time; with a warm one the first
# step is much shorter.) **break-even = time of the first step / gain of a step**: compare it with the number of steps
# of *your* run. A gain as small as the noise is none. Each new shape of input may compile
# anew, so keep batches equal, or drop the last one. Time steps only after some that warm up, and give the first one a
# long timeout, since ranks may compile at different speeds. The loop takes `--model.compile inductor` and compiles
# the *inner* network, before DDP wraps it.
#
# ## In three lines
#
# - The slow rank is the one with the least waiting: look at the time before the collective, then at why.
# - Take unions, not sums. Exposed communication costs, hidden communication does not.
# - Busy is not useful: MFU from counted FLOPs and a real peak; count what compiling costs before you compile.
#
# ## On A100s
#
# An A100's dense peak is 312 TFLOP/s in bf16 and 156 in TF32 (NVIDIA's data sheet; the doubled values there are for
# sparse matrices). The loop knows it and prints the MFU by itself. One A100 trains ResNet-50 at 2470 images a second
# with AMP (NVIDIA DeepLearningExamples, DGX A100 80GB, 21.03). **Predict** its MFU:

# %%
resnet = flops.count(torchvision.models.resnet50(), (3, 224, 224))
print(f"{resnet / 1e9:.1f} GFLOP an image; MFU {resnet * 2470 / 312e12:.0%}")

# %% [markdown]
# A well-tuned run, and no bad one: much of a convolutional network's time goes to memory, not to arithmetic. So
# compare with what others reach with *your* network, not with 100 %. And measure in this order: one GPU on synthetic
# data (`--data.name synthetic:3x224x224`), one GPU on real data, then eight. What the second loses is the loader's;
# what the third loses is communication, or a thief.
#
# ## Exercise
#
# [Exercise 11: where time goes](../exercises/11_where_time_goes/11_where_time_goes.ipynb) From a trace to the thief.
# About 45 minutes.
