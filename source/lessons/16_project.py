# %% [markdown]
# # 16 · Project
#
# **Afterwards you can** take a training job from one process to many in an order in which each step proves the one
# before; predict a number at each step, and measure it; and start ResNet-50 here and on eight A100s with the same
# command.
#
# **Time** 25 minutes to read; the cells run in less than a minute. The exercise is the project itself: 4 to 5 hours.

# %%
import tempfile
from pathlib import Path

import torchvision

from course_lib import show, train
from course_lib.cli import main as course

box = tempfile.TemporaryDirectory(prefix="project-")  # it goes with the kernel
base = Path(box.name)

# %% [markdown]
# ## The order of work
#
# A job on many GPUs fails in expensive ways: it is slow and nobody knows why; it is fast and learns something else; it
# dies in the second night. Each has a cheap test that comes *before*. So scaling has an order, and each step one number
# that you write down before you measure it:
#
# | step | the question | the number |
# |---|---|---|
# | plan | how much is there to do, and to send? | steps, bytes |
# | one | does one process learn? | the first loss |
# | equal | do N ranks compute the same? | the largest difference in float64 |
# | speed | what do N ranks gain, and what takes the rest? | efficiency, comm share |
# | survive | what does a kill cost? | the step from which it goes on |
# | report | would somebody else believe it? | all of them, on one page |
#
# Not before "equal" is speed worth a look: a wrong gradient is often a fast one. A tiny example of all six, with the
# course's CNN on the digits:

# %%
job = {"optim.epochs": 2, "model.dropout": 0.0}
classes, samples, batch = 10, 1437, 48

# %% [markdown]
# **Plan.** The network has a convolution from 1 to 16 channels of 3x3, one from 16 to 32, a linear layer from 512 to 64
# and one from 64 to 10, all with biases. **Predict** the bytes of its gradients and the steps of 2 epochs:

# %%
parameters = (9 * 1 + 1) * 16 + (9 * 16 + 1) * 32 + (512 + 1) * 64 + (64 + 1) * classes
steps = -(-samples // batch) * 2
print(f"predicted: {4 * parameters:,} bytes, {steps} steps")

# %%
one = train("digits", ranks=1, dir=base / "one", **job)
print(f"measured:  {one.facts['gradient_bytes']:,} bytes, {one.facts['steps']} steps")

# %% [markdown]
# When such a number is not what you predicted, stop. Either you do not know your network, or the loop does something
# that you did not ask for: a frozen layer, an epoch that leaves samples out.
#
# **One.** Before it has learned anything, a network guesses. **Predict** the first loss for ten classes. (The mean of
# -ln 1/10.) A first loss far from that is a wrong label, a wrong scale, or a wrong loss, and no number of GPUs helps.

# %%
print(f"first loss {one.losses[0]:.3f}, last {one.losses[-1]:.3f}, test accuracy {one.accuracy:.3f}")

# %% [markdown]
# **Equal.** Two ranks with the same global batch add the same numbers in another order. **Predict** how far their
# losses are apart at most: in 60 steps of float32, and in the first 10 of float64.

# %%
two = train("digits", ranks=2, dir=base / "two", **job)
precise = job | {"model.dtype": "float64", "run.stop_after": 10}
exact = [train("digits", ranks=ranks, dir=base / f"exact{ranks}", **precise) for ranks in (1, 2)]
for name, (a, b) in (("float32", (one, two)), ("float64", exact)):
    apart = max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))
    print(f"{name}: the losses of 1 and 2 ranks differ by {apart:.1e} at most")

# %% [markdown]
# In float64 next to nothing is left. A mistake (a mean of means, a rate that was scaled once too often, BatchNorm by
# rank) is as large there as in float32, and so it stands out. That is the proof; two curves that "look alike" are none.
#
# **Speed.** **Predict** the efficiency: samples/s of two ranks, divided by twice those of one.

# %%
efficiency = two.samples_per_s / (2 * one.samples_per_s)
shares = sorted(row["comm_share"] for row in two.rows("train"))
print(f"{one.samples_per_s:,.0f} samples/s on one rank, {two.samples_per_s:,.0f} on two: efficiency {efficiency:.0%}")
print(f"communication that nothing hides: {shares[len(shares) // 2]:.0%} of a step (median)")

# %% [markdown]
# Perhaps two ranks are slower than one. That is no mistake: the step is short, and each all-reduce has a price of its
# own (lesson 04). Now you *know* it, before you have paid for a second machine. And more than 100 % is a machine that
# had something else to do: measure again, in turn. The next question is always the same: which part of the step grew?
# A trace says it (lesson 11).
#
# **Survive.** Checkpoints come every 20 steps, and rank 1 gets kill -9 some time after step 30. **Predict** from which
# step it goes on.

# %%
panel = show.kill_button("digits", ranks=2, dir=base / "killed", restarts=3, **job, **{"run.save_every": 20})
killed = panel.wait(rank=1, step=30)
print(panel.kills[0], "and it went on from step", killed.rows("start")[-1]["step"])
print("the same bits:", killed.losses == two.losses)

# %% [markdown]
# **Report.** One page from the folders, so that nobody has to believe a table that was typed:

# %%
_ = course(["report", *(str(base / name) for name in ("one", "two", "killed")), "--out", str(base / "report.html")])

# %% [markdown]
# ## ResNet-50
#
# Now a real one. **Predict** from the architecture's well-known 25.6 million parameters: how many MiB of gradients does
# each step carry?

# %%
net = torchvision.models.resnet50()
parameters = sum(p.numel() for p in net.parameters())
print(f"{parameters:,} parameters, {4 * parameters / 2**20:.1f} MiB of float32 gradients")

# %% [markdown]
# The recipe `resnet50-a100` is for ImageNet on eight GPUs. It runs here as well, on noise of 64x64 in place of images,
# with 8 samples a step instead of 2048, for one step. What we change is said on the command line; the network, the
# rule for the rate and the loop are those of the big run. (bf16 goes, too: many processors have no arithmetic for it.)
#
# Noise has ten classes and ImageNet a thousand. **Predict** the parameters: the last layer is a linear one, from 2048.

# %%
small = {"data.name": "synthetic:3x64x64", "data.side": 0, "data.workers": 0, "amp.dtype": "none"}
small |= {"data.global_batch": 8, "data.batch": 0, "run.stop_after": 1, "run.log_every": 1}
resnet = train("resnet50-a100", ranks=2, dir=base / "resnet50", **small)
print(resnet.plan)

# %%
print(f"predicted {parameters - 990 * 2049:,} parameters, measured {resnet.facts['parameters']:,}")

# %% [markdown]
# Read the plan before every run. Here it says that the rate is 0.1 for 256 images, scaled to 8; with 2048 it would be
# 0.8, after a warm-up of five epochs (Goyal et al. 2017). The steps are those of the noise, not of ImageNet.
#
# ## What others have reached
#
# NVIDIA DeepLearningExamples, ResNet-50 v1.5 on a DGX A100 80GB (21.03), 256 images a GPU: 938 images/s on one GPU with
# TF32 and 2470 with AMP; on eight 7248 and 16621. **Predict:** which of the two scales better, and why?

# %%
for name, one_gpu, eight in (("TF32", 938, 7248), ("AMP", 2470, 16621)):
    step = 256 / one_gpu * 1000
    print(f"{name}: a step takes {step:.0f} ms on one GPU; {eight / one_gpu:.2f} times as fast on 8, "
          f"efficiency {eight / one_gpu / 8:.0%}")  # fmt: skip

# %% [markdown]
# The faster one scales *worse*. The gradients weigh the same, and images must come as fast as they are used up; what
# computes faster has less time to hide both behind. (MXNet in the same repository goes from 3410.52 to 26673.72 with
# AMP, 7.82 times, so this is no law.) An efficiency without the speed that it belongs to says little.
#
# How long are 90 epochs of 1,281,167 images at that rate?

# %%
print(f"{90 * 1_281_167 / 16621 / 3600:.1f} hours of steps")

# %% [markdown]
# The same page says about 3 hours. A rate of steps is not a run, which also starts, evaluates and saves. So measure
# both, and report the whole.
#
# ## In three lines
#
# - Plan, one, equal, speed, survive, report: in this order, and before each step a number that you predict.
# - Equality is shown in float64, on the first steps; speed is a figure with its machine, command and noise.
# - What runs on eight GPUs has run on two ranks of a laptop before, with the same command.
#
# ## On A100s
#
# The same commands, one after the other. First the machine, then one GPU on noise, one GPU on images, eight GPUs:
#
# ```
# course doctor
# torchrun --standalone --nproc-per-node=1 -m course_lib.train resnet50-a100 --data.name synthetic:3x224x224 \
#     --data.side 0 --data.samples 20480 --run.stop_after 100 --run.dir runs/noise
# torchrun --standalone --nproc-per-node=1 -m course_lib.train resnet50-a100 --data.root /data/imagenet \
#     --run.stop_after 100 --run.dir runs/one
# torchrun --standalone --nproc-per-node=8 -m course_lib.train resnet50-a100 --data.root /data/imagenet \
#     --run.stop_after 100 --run.dir runs/eight
# course report runs/noise runs/one runs/eight --out report.html
# torchrun --standalone --nproc-per-node=8 --max-restarts=3 -m course_lib.train resnet50-a100 \
#     --data.root /data/imagenet --run.dir runs/whole
# ```
#
# What the second run loses is the loader's; what the third loses is communication, or a thief. The global batch is 2048
# each time, so one GPU takes eight microbatches of 256 a step. None of this was run on A100s here; the options were, on
# two ranks, by the cell above. What changes on many nodes is a lesson of its own.
#
# ## Exercise
#
# [Exercise 16: the project](../exercises/16_project/16_project.ipynb) From one process to several in seven stages, with
# a judge that runs it again. 4 to 5 hours.
