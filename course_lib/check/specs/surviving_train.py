"""Exercise 10, second part: a loop that is killed and started again ends as one that was left alone, bit for bit.

Three ranks. A launch is killed by an exception that nobody catches, from inside `batch`, on all ranks at the same
step: so it costs nothing to kill often. The oracle, one process, is in `surviving_oracle.py`.
"""

import hashlib
import io
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.check import in_rank
from course_lib.check.group import GroupCase

WORLD, BATCH = 3, 4
INPUTS, HIDDEN, CLASSES = 5, 8, 3
LAST, EVERY = 5, 2
RATE, MOMENTUM = 0.2, 0.9
SAVES = [2, 4, 5]
KILLED_AT = (None, 4, None, None)  # the straight run, then three launches of one run
STEPS = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [3, 4, 5], []]  # that each launch has to ask for


class Killed(BaseException):
    """As kill -9 it cannot be refused: no `except Exception` sees it."""


class Disagree(BaseException):
    """The ranks of a launch begin with different steps: they would wait for each other without end."""


class Noise(nn.Module):
    """Dropout by the global generator, as torch's; it notes the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.masks.append((torch.rand(x.shape) < 0.7).double())
        return x * self.masks[-1] / 0.7


def network(seed: int) -> nn.Sequential:
    """float64, so that rounding is no excuse. The process's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        parts = [nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh(), Noise(), nn.Linear(HIDDEN, CLASSES)]
        return nn.Sequential(*parts).double()


def sgd(parameters: Any) -> torch.optim.SGD:
    """What `train` gets as its optimizer."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


class Disk:
    """What the learner gets as `checkpoints`: save and load_newest, with a note of who calls. One folder for all.

    The last rank sees what was saved a moment later than the others, as on a network disk.
    """

    def __init__(self, folder: Path, note: dict[str, Any]) -> None:
        self.folder, self.note = folder, note
        self.lags = dist.get_rank() == WORLD - 1

    def save(self, step: int, state: dict[str, Any]) -> None:
        """As in the first part. Only rank 0's is written."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.note["saves"].append([step, _of_modules(state), _weights_in(state)])
        try:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception:  # noqa: BLE001 - whatever it says: it cannot be loaded as data
            self.note["objects"] = True
            (self.folder / "objects").touch()
        if dist.get_rank() == 0:
            (self.folder / "beside").write_bytes(buffer.getvalue())
            (self.folder / "beside").replace(self.folder / f"{step:04d}")

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """As in the first part."""
        self.note["loads"] += 1
        found = sorted(path for path in self.folder.glob("[0-9]*"))[: -1 if self.lags else None]
        if not found:
            return None
        safe = not (self.folder / "objects").exists()
        return int(found[-1].name), torch.load(found[-1], weights_only=safe)  # not data: we wrote it ourselves just now


def _of_modules(state: Any) -> bool:
    """Whether some key begins with "module."."""
    if not isinstance(state, dict):
        return False
    return any(str(key).startswith("module.") or _of_modules(value) for key, value in state.items())


def _weights_in(state: Any) -> str:
    """A word for the tensor of the first layer's weights in a state, wherever it is; "" when there is none."""
    if isinstance(state, torch.Tensor) and state.shape == (HIDDEN, INPUTS):
        return hashlib.sha256(state.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
    parts = [value for key, value in state.items() if key != "optimizer"] if isinstance(state, dict) else []
    return next((word for part in parts if (word := _weights_in(part))), "")


class Launch:
    """One start of `train` on this rank: what a script would build, and notes of what came of it."""

    def __init__(self, number: int, data: torch.Tensor, folder: Path, killed_at: int | None) -> None:
        self.data, self.killed_at, self.rank = data, killed_at, dist.get_rank()
        self.note: dict[str, Any] = {"asked": [], "saves": [], "loads": 0, "objects": False, "starts": []}
        self.weights: list[torch.Tensor] = []
        self.held: torch.Tensor | None = None
        seed = 100 * max(number, 1) + self.rank  # the straight run and the first launch of the other are alike
        self.module = network(seed)
        self.model = DistributedDataParallel(self.module)
        self.optimizer = sgd(self.model.parameters())
        self.disk = Disk(folder, self.note)
        # DDP's first backward sums in another order than later ones: it is done before, also in the straight run.
        self.model.eval()
        (self.model(torch.zeros(1, INPUTS, dtype=torch.float64)).sum() * 0).backward()
        self.model.train()
        self.model.zero_grad()
        self.optimizer.register_step_post_hook(lambda *_: self.weights.append(flat(self.module.parameters())))
        torch.manual_seed(seed)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels of this rank in this step."""
        if not self.note["asked"]:
            self.begin(step)
        self.note["asked"].append(step)
        if step == self.killed_at:
            raise Killed
        rows = self.data[(step - 1) % len(self.data)]
        return rows[:, :INPUTS].clone(), rows[:, INPUTS].long()

    def begin(self, step: int) -> None:
        """Before the first batch, or at the end when there was none: do all ranks begin with the same step?"""
        self.held = flat(self.module.parameters())
        starts = [torch.zeros(1, dtype=torch.int64) for _ in range(WORLD)]
        dist.all_gather(starts, torch.tensor([step]))
        self.note["starts"] = [int(start) for start in starts]
        if len(set(self.note["starts"])) > 1:
            raise Disagree

    def go(self, train: Callable) -> bool:
        """Whether the next launch makes sense."""
        try:
            train(self.model, self.optimizer, self.batch, self.disk, LAST, EVERY)
        except Killed:
            return True
        except Disagree:
            return False
        if not self.note["asked"]:
            try:
                self.begin(0)
            except Disagree:
                return False
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        nothing = torch.zeros(0, dtype=torch.float64)
        return {
            "held": nothing if self.held is None else self.held,
            "weights": torch.stack(self.weights) if self.weights else nothing,
            "masks": torch.stack(masks) if (masks := self.module[3].masks) else nothing,
            "parameters": flat(self.module.parameters()),
            "buffers": flat(self.module.buffers()),
        }


def drive(train: Callable, data: torch.Tensor) -> tuple[dict, dict]:
    """`data`: this rank's, one row for each step. Facts and tensors of each launch, by its number."""
    box: list[Any] = [None]
    notes, tensors = [], {}
    held = tempfile.TemporaryDirectory(dir=in_rank.place, prefix="launches-") if dist.get_rank() == 0 else None
    try:
        box[0] = held and held.name
        dist.broadcast_object_list(box, src=0)
        for number, killed_at in enumerate(KILLED_AT):
            folder = Path(box[0], "straight" if number == 0 else "hurt")
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - by each rank
            launch = Launch(number, data, folder, killed_at)
            on = launch.go(train)
            notes.append(launch.note)
            tensors |= {f"{name} {number}": value for name, value in launch.tensors().items()}
            if not dist.is_initialized():
                break
            dist.barrier()
            if not on:
                break
    finally:
        if held:
            held.cleanup()
    return {"launches": notes}, tensors


def cases(rng: random.Random) -> list[GroupCase]:
    """One: five steps on three ranks, killed in step 4."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    inputs = []
    for _ in range(WORLD):
        rows = torch.randn(LAST, BATCH, INPUTS + 1, generator=generator, dtype=torch.float64)
        rows[..., -1] = torch.randint(CLASSES, (LAST, BATCH), generator=generator)
        inputs.append(rows)
    nothing = (torch.zeros(0),) * WORLD
    return [GroupCase("launches", "3 ranks, 5 steps, a checkpoint every 2", tuple(inputs), nothing, drive=drive)]
