"""What the loop can do beyond its defaults: weights after each step on 3 ranks, against plain torch in one process.

One run of ranks does all of it. The other side knows nothing of course_lib's loop: whole batches, the formulas of the
papers written out, float64.
"""

import math
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib import run
from course_lib.train.cli import parse
from course_lib.train.config import Config
from course_lib.train.environment import Environment
from course_lib.train.errors import Diverged
from course_lib.train.job import Job
from course_lib.train.journal import Journal
from course_lib.train.loop import fit, gradients
from course_lib.train.model import ModelConfig, build
from course_lib.train.order import epoch_order
from course_lib.train.placement import blocks_of, hasten, recompute
from course_lib.train.prepare import prepare
from course_lib.train.stopping import StopRequest
from course_lib.train.transforms import mixup
from course_lib.train.update import Update

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.slow
EXACT = {"rtol": 1e-12, "atol": 1e-14}
SMALL = "digits --model.name mlp --model.width 2 --model.dropout 0 --model.dtype float64 --data.global_batch 444"
SMALL += " --optim.epochs 2 --optim.warmup_epochs 0.5"  # 1437 = 3 * 444 + 105: step 4 is a tail, of 35 a rank
SMALL += " --run.stop_after 5"  # of 8 steps: the tail and one of the next epoch are among them
CNN = "digits --model.width 2 --model.norm batch --model.dropout 0.3 --data.global_batch 480 --optim.epochs 1"
HARD = "--optim.nesterov --optim.decay matrices --optim.clip 0.3"
ADAMW = "--optim.name adamw --optim.lr 0.01 --optim.reference_batch 111"
CASES = {  # name: (words, what plain torch does)
    "plain": ("", {}),
    "accumulate": ("--data.accumulate 4", {}),  # the tail: 35 = 37 - 2 a rank at once
    # 37 microbatches; the tail: 8 of 4 and one of 3
    "small batch, bucket view": ("--data.batch 4 --ddp.gradient_as_bucket_view", {}),
    "nesterov": (HARD, {"nesterov": True, "clip": 0.3, "matrices": True}),
    "zero": (f"{HARD} --optim.zero", {"nesterov": True, "clip": 0.3, "matrices": True}),
    "adamw": (ADAMW, {"adamw": True, "lr": 0.02}),
    "zero adamw": (f"{ADAMW} --optim.zero", {"adamw": True, "lr": 0.02}),
    "linear": (
        "--optim.reference_batch 222 --optim.label_smoothing 0.1 --optim.average 0.8",
        {"lr": 0.1, "smoothing": 0.1},
    ),
}
OTHERS = {
    "cnn": CNN,
    "recompute": f"{CNN} --model.recompute",
    "channels_last": f"{CNN} --model.channels_last",
    "amp bf16": f"{CNN} --amp.dtype bf16",
    "amp fp16": f"{CNN} --amp.dtype fp16 --optim.clip 1 --data.accumulate 2",
    **{hook: f"{CNN} --ddp.comm_hook {hook}" for hook in ("fp16", "bf16", "onebit", "ring", "shared")},
    "powersgd": f"{CNN} --ddp.comm_hook powersgd --ddp.powersgd_start 2",
}
EVERYTHING = (
    f"{CNN} --amp.dtype fp16 --amp.growth_interval 2 --optim.average 0.9 --optim.zero --optim.name adamw "
    "--optim.lr 0.01 --optim.clip 1 --data.accumulate 2 --data.mixup 0.3 --model.recompute "
    "--ddp.gradient_as_bucket_view"
)
SPLITS = {  # microbatches of each rank
    "4 of 8 are one of 32": [[8, 8, 8, 8], [8, 8, 8, 8], [32]],
    "uneven": [[8, 8, 4], [20], [5, 15]],
    "a rank without samples": [[3], [1, 1], [0]],
}


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().flatten().double() for t in tensors])


class Spy:
    """In place of job.update: keeps gradients as they come out of backward, weights and buffers after each step."""

    def __init__(self, job: Job) -> None:
        self.job, self.update, self.steps = job, job.update, []
        job.update = self

    @property
    def skipped(self) -> int:
        return self.update.skipped

    def __call__(self, want_norm: bool = False) -> torch.Tensor | None:
        scale = self.job.scaler.get_scale() if self.job.scaler.is_enabled() else 1.0
        grads = flat(p.grad for p in self.update.parameters) / scale
        norm = self.update(want_norm)
        weights, buffers = flat(self.job.module.parameters()), flat([*self.job.module.buffers(), torch.zeros(1)])
        now = {"grads": grads, "norm": norm, "weights": weights, "buffers": buffers}
        self.steps.append(now | {"scale": scale, "skipped": self.skipped})
        return norm


def burst_at(job: Job, step: int) -> None:
    """Rank 1's gradient overflows in the last of its two backwards of a step, before anything is averaged."""
    calls = []

    def burst(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * float("inf") if dist.get_rank() == 1 and len(calls) == 2 * step else gradient

    next(job.module.parameters()).register_hook(burst)


def numbers(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers this rank's optimizer keeps; with ZeRO-1 that is the inner one."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    return sum(t.numel() for state in states for t in state.values() if isinstance(t, torch.Tensor))


def ready(config: Config, folder: str, env: Environment) -> Job:
    return prepare(replace(config, run=replace(config.run, dir=Path(folder))), env)


def train(config: Config, folder: str, env: Environment, overflow_at: int | None = None) -> dict:
    job = ready(config, folder, env)
    spy = Spy(job)
    if overflow_at:
        burst_at(job, overflow_at)
    fit(job, Journal(job, ""), StopRequest())
    averaged = flat(job.average.module.parameters()) if job.average.module else None
    return {"steps": spy.steps, "average": averaged, "kept": numbers(job.optimizer)}


def split_gradients(job: Job, split: list[list[int]]) -> torch.Tensor:
    """Gradients of microbatches of these sizes, made up of the first samples of the training set."""
    before, mine = sum(sum(part) for part in split[: job.env.rank]), split[job.env.rank]
    parts, start = [], before
    for number, size in enumerate(mine, 1):
        items = [job.data.train[1, i] for i in range(start, start + size)]
        images = torch.stack([image for image, _ in items]) if items else torch.empty(0, *job.data.shape)
        parts.append((images, torch.tensor([label for _, label in items], dtype=torch.int64), number == len(mine)))
        start += size
    job.order = SimpleNamespace(count=lambda step: sum(map(sum, split)))
    job.optimizer.zero_grad()
    gradients(job, 1, parts)
    return flat(p.grad for p in job.module.parameters())


def configurations() -> dict[str, Config]:
    """Read here, once: the command line of a rank takes longer than its steps."""
    words = {name: f"{SMALL} {more}" for name, (more, _) in CASES.items()} | OTHERS
    words |= {"overflow": OTHERS["amp fp16"], "straight": EVERYTHING, "stopped": f"{EVERYTHING} --run.stop_after 2"}
    words |= {"split": SMALL, "normed": f"{CNN} --model.dropout 0"}
    return {name: parse(text.split()) for name, text in words.items()}


def in_ranks(folder: str, configs: dict[str, Config]) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    env = Environment(rank, rank, size, torch.device("cpu"), "gloo", dist.group.WORLD)
    found = {name: train(configs[name], f"{folder}/{name}", env) for name in [*CASES, *OTHERS]}
    found["overflow"] = train(configs["overflow"], f"{folder}/overflow", env, overflow_at=2)
    for name, folder_of in (("straight", "straight"), ("stopped", "resumed"), ("straight", "resumed")):
        found[folder_of] = train(configs[name], f"{folder}/{folder_of}", env)
    for name, split in SPLITS.items():
        found[name] = split_gradients(ready(configs["split"], f"{folder}/{name}", env), split)
    job = ready(configs["normed"], f"{folder}/normed", env)
    found["normed"] = split_gradients(job, [[2, 2], [6], [3, 3, 2]])  # buffers are sent once a step, whatever the parts
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    return folder, run(in_ranks, ranks=3, args=(str(folder), configurations()), timeout=120)


@pytest.fixture(scope="module")
def digits(root):
    with np.load(root / "course_lib" / "data" / "digits.npz") as arrays:
        train = np.arange(1797) % 5 != 0
        images = (torch.from_numpy(arrays["images"][train]).float().unsqueeze(1) / 16 - 0.305) / 0.376
        return images.double(), torch.from_numpy(arrays["labels"][train]).long()


def plain_torch(digits, adamw=False, nesterov=False, matrices=False, clip=0.0, lr=0.05, smoothing=0.0):
    """Eight steps of whole batches; yields weights and the norm of the gradients before clipping."""
    net = build(ModelConfig("mlp", width=2, dropout=0, dtype="float64"), (1, 8, 8), 10, seed=0)
    plain = [p for p in net.parameters() if not matrices or p.ndim > 1]
    rest = [p for p in net.parameters() if matrices and p.ndim == 1]
    groups = [{"params": plain, "weight_decay": 5e-4}] + [{"params": rest, "weight_decay": 0.0}] * bool(rest)
    if adamw:
        optimizer = torch.optim.AdamW(groups, lr=lr)
    else:
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=nesterov)
    step = 0
    for epoch in (1, 2):
        for chosen in torch.from_numpy(epoch_order(0, epoch, 1437)).split(444):
            step += 1
            warm = step <= 2  # half an epoch of four steps
            rate = lr * step / 2 if warm else lr * 0.5 * (1 + math.cos(math.pi * (step - 2) / 7))
            for group in optimizer.param_groups:
                group["lr"] = rate
            F.cross_entropy(net(digits[0][chosen]), digits[1][chosen], label_smoothing=smoothing).backward()
            norm = math.sqrt(sum(float((p.grad**2).sum()) for p in net.parameters()))
            if clip and norm > clip:
                for p in net.parameters():
                    p.grad *= clip / (norm + 1e-6)  # torch adds this
            optimizer.step()
            optimizer.zero_grad()
            yield flat(net.parameters()), norm


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_torch_after_each_step(done, digits, name):
    wanted = list(islice(plain_torch(digits, **CASES[name][1]), 5))
    for rank in range(3):
        steps = done[1].results[rank][name]["steps"]
        assert len(steps) == 5
        for number, (step, (weights, norm)) in enumerate(zip(steps, wanted, strict=True), 1):
            torch.testing.assert_close(step["weights"], weights, **EXACT, msg=lambda m, n=number: f"step {n}: {m}")
            assert float(step["norm"]) == pytest.approx(norm, rel=1e-12)
    assert len({tuple(done[1].results[rank][name]["steps"][-1]["weights"].tolist()) for rank in range(3)}) == 1


@pytest.mark.parametrize("name", SPLITS)
def test_microbatches_add_up_to_the_whole_batch(done, digits, name):
    count = sum(map(sum, SPLITS[name]))
    net = build(ModelConfig("mlp", width=2, dropout=0, dtype="float64"), (1, 8, 8), 10, seed=0)
    F.cross_entropy(net(digits[0][:count]), digits[1][:count]).backward()
    for rank in range(3):
        torch.testing.assert_close(done[1].results[rank][name], flat(p.grad for p in net.parameters()), **EXACT)


def test_ranks_with_other_numbers_of_microbatches_agree_with_batchnorm(done):
    first = done[1].results[0]["normed"]
    assert first.abs().max() > 0
    assert all(torch.equal(first, done[1].results[rank]["normed"]) for rank in (1, 2))


def test_one_all_reduce_a_bucket_a_step(done):
    """The mlp has one bucket of this size: one for each of 5 steps, and the thrown-away one; 37 microbatches or one."""
    parameters = (64 * 16 + 16) + (16 * 10 + 10)
    sent = [m for m in done[1].messages if m.rank == 0 and m.op == "all_reduce" and m.nbytes == 8 * parameters]
    assert len(sent) == len(CASES) * (5 + 1) + len(SPLITS) * (1 + 1)


def test_zero_keeps_a_part_and_saves_the_whole(done):
    folder, result = done
    parts = [result.results[rank]["zero"]["kept"] for rank in range(3)]
    assert sum(parts) == result.results[0]["nesterov"]["kept"]
    assert max(parts) < sum(parts)
    for zero, plain in (("zero", "nesterov"), ("zero adamw", "adamw")):
        saved = [torch.load(newest(folder / name), weights_only=True) for name in (zero, plain)]
        ours, theirs = (part["optimizer"]["state"] for part in saved)
        assert ours.keys() == theirs.keys()
        for key in ours:
            for field, value in theirs[key].items():
                assert torch.equal(torch.as_tensor(ours[key][field]), torch.as_tensor(value))


def newest(folder):
    return max((folder / "checkpoints").iterdir()) / "state.pt"


def test_average_of_weights_by_its_formula(done, digits):
    folder, result = done
    weights = [step["weights"] for step in result.results[0]["linear"]["steps"]]
    average = weights[0]
    for now in weights[1:]:
        average = 0.8 * average + 0.2 * now
    torch.testing.assert_close(result.results[2]["linear"]["average"], average, **EXACT)
    saved = torch.load(newest(folder / "linear"), weights_only=True)
    torch.testing.assert_close(flat(saved["average"].values()), average, **EXACT)
    assert saved["average"].keys() == saved["model"].keys()
    rows = (folder / "linear" / "metrics.jsonl").read_text().splitlines()
    assert sum("average_accuracy" in row for row in rows) == 1


def test_recomputing_changes_no_bit(done):
    """BatchNorm and dropout in it: statistics are counted once, and the same activations are dropped."""
    for rank in range(3):
        for plain, again in zip(*(done[1].results[rank][name]["steps"] for name in ("cnn", "recompute")), strict=True):
            assert torch.equal(plain["weights"], again["weights"])
            assert torch.equal(plain["buffers"], again["buffers"])


NEAR = [("channels_last", 1e-5), ("ring", 1e-5), ("shared", 1e-5), ("powersgd", 1e-5)]
NEAR += [("amp bf16", 0.05), ("fp16", 0.05), ("bf16", 0.05)]


@pytest.mark.parametrize(("name", "near"), NEAR)
def test_gradients_of_the_first_step_are_near(done, name, near):
    plain, other = (done[1].results[0][case]["steps"][0]["grads"] for case in ("cnn", name))
    error = (plain - other).norm() / plain.norm()
    assert error < near
    if near > 1e-3:
        assert error > 1e-5  # 16 bits did happen


@pytest.mark.parametrize("hook", ["fp16", "bf16", "onebit", "ring", "shared", "powersgd"])
def test_with_every_hook_ranks_stay_equal(done, hook):
    for number in range(3):
        first, *others = (done[1].results[rank][hook]["steps"][number] for rank in range(3))
        assert all(torch.equal(first["weights"], other["weights"]) for other in others)
        assert torch.isfinite(first["weights"]).all()


def test_an_overflow_on_one_rank_skips_the_step_on_all(done):
    for rank in range(3):
        steps = done[1].results[rank]["overflow"]["steps"]
        assert [step["scale"] for step in steps] == [2.0**16, 2.0**16, 2.0**15]
        assert [step["skipped"] for step in steps] == [0, 1, 1]
        assert torch.equal(steps[0]["weights"], steps[1]["weights"])
        assert not torch.equal(steps[1]["weights"], steps[2]["weights"])
        assert torch.isfinite(steps[2]["weights"]).all()
        straight = done[1].results[rank]["amp fp16"]["steps"]
        assert [step["skipped"] for step in straight] == [0, 0, 0]
        assert not torch.equal(straight[0]["weights"], straight[1]["weights"])


def test_overflow_after_overflow_ends_the_run():
    weight = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**-13)
    update = Update(optimizer, scaler, [weight])
    scaler.scale(weight.sum() * float("inf")).backward()
    update()
    assert (scaler.get_scale(), update.skipped) == (2.0**-14, 1)
    scaler.scale(weight.sum() * float("inf")).backward()
    with pytest.raises(Diverged, match=r"has come down to 3\.05176e-05; a smaller"):
        update()
    assert weight.tolist() == [1, 1]


def test_fp16_gradients_are_unscaled_before_they_are_clipped(done):
    for step, plain in zip(*(done[1].results[0][name]["steps"] for name in ("amp fp16", "cnn")), strict=True):
        assert float(step["norm"]) == pytest.approx(float(step["grads"].norm()), rel=1e-3)
        assert float(step["norm"]) == pytest.approx(float(plain["norm"]), rel=0.5)


def test_keys_are_those_of_the_bare_network(done):
    folder, _ = done
    bare = build(ModelConfig(width=2, norm="batch"), (1, 8, 8), 10, seed=0).state_dict().keys()
    for name in OTHERS:
        assert torch.load(newest(folder / name), weights_only=True)["model"].keys() == bare


def test_a_resumed_run_has_the_bits_of_the_straight_one(done):
    """Scaler, average, parts of the optimizer, mixtures: all of it in one run, stopped after 2 of 3 steps."""
    folder, result = done
    assert [step["scale"] for step in result.results[0]["straight"]["steps"]] == [2.0**16, 2.0**16, 2.0**17]
    assert [step["scale"] for step in result.results[0]["resumed"]["steps"]] == [2.0**17]
    straight, resumed = (torch.load(newest(folder / name), weights_only=True) for name in ("straight", "resumed"))
    assert straight.keys() == {"step", "world_size", "model", "optimizer", "scaler", "average"}
    assert equal_bits(straight, resumed)


def equal_bits(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_mixup_is_its_formula():
    images, labels = torch.rand(5, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1])
    same, names = mixup(0.0, 3)(images, labels)
    assert same is images
    assert names is labels
    torch.manual_seed(3)
    mixed, soft = mixup(0.4, 3)(images, labels)
    part = float(soft[1, 1])  # of itself; the rest is its neighbour's
    assert 0 < part < 1
    torch.testing.assert_close(mixed, part * images + (1 - part) * images.roll(1, 0))
    assert soft.sum(1) == pytest.approx([1.0] * 5)
    assert soft[0].tolist() == pytest.approx([part, 1 - part, 0])


def test_compiling_changes_neither_keys_nor_weights():
    """In one process: a compiler takes five seconds on each rank, and DDP sees only the network's parameters."""
    config = ModelConfig("mlp", width=1, dropout=0, compile="eager")
    plain, compiled = (build(config, (1, 2, 2), 3, seed=0) for _ in range(2))
    hasten(compiled, config)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    images = torch.randn(5, 1, 2, 2)
    for net in (plain, compiled):
        net(images).square().sum().backward()
    assert compiled._compiled_call_impl is not None
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_recomputing_keeps_less():
    """Bytes that autograd keeps for backward, counted as it packs them."""

    def kept(net: nn.Module) -> int:
        sizes = []
        weights = {p.data_ptr() for p in net.parameters()}

        def pack(tensor):
            sizes.append(0 if tensor.data_ptr() in weights else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            net(torch.ones(100, 4, requires_grad=True)).sum()
        return sum(sizes)

    plain, again = Deep(), Deep()
    assert blocks_of(again) == list(again.blocks)
    recompute(again)
    assert kept(plain) >= 3 * 2 * 400  # what goes into each Linear
    assert kept(again) <= 3 * 400  # what goes into each block
