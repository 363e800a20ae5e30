"""The contenders of `course bench loop` that must be installed first: requirements-bench.txt."""

import importlib.util
import logging
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F

from course_lib.train.bench_loop_contenders import Contender, Pause
from course_lib.train.bench_loop_job import Equal

FABRIC, ACCELERATE, TRAINER = "Lightning Fabric", "Accelerate", "Lightning Trainer"
PACKAGES = {FABRIC: "lightning", ACCELERATE: "accelerate", TRAINER: "lightning"}


def missing(names: list[str]) -> tuple[list[str], str]:
    """(those of the peers that can run, a sentence about the others or "")."""
    lost = [name for name in names if importlib.util.find_spec(PACKAGES[name]) is None]
    packages = " and ".join(dict.fromkeys(PACKAGES[name] for name in lost))
    sentence = f"Left out, because {packages} cannot be imported: {', '.join(lost)}. " if lost else ""
    sentence += "To compare with them: pip install -r requirements-bench.txt" if lost else ""
    return [name for name in names if name not in lost], sentence


def quiet() -> None:
    """Without lightning's words about devices and tips, once it is imported; what goes wrong is still raised."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def fabric(equal: Equal) -> Contender:
    """Fabric's DDP and its backward in a hand-written loop."""
    module = equal.network()

    def train(pause: Pause) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment
        from lightning.fabric.strategies import DDPStrategy

        quiet()
        there = {"strategy": DDPStrategy(process_group_backend="gloo"), "plugins": [TorchElasticEnvironment()]}
        helper = Fabric(accelerator="cpu", devices=equal.env.world_size, **there)
        helper.launch()
        model, optimizer = helper.setup(module, equal.optimizer(module))
        for images, labels in helper.setup_dataloaders(equal.loader(), use_distributed_sampler=False):
            loss = F.cross_entropy(model(images), labels)
            helper.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            pause()

    return Contender(module, train)


def accelerate(equal: Equal) -> Contender:
    """Accelerate's DDP, optimizer and backward; its loader would deal the batches of the ranks out again."""
    module = equal.network()

    def train(pause: Pause) -> None:
        from accelerate import Accelerator

        helper = Accelerator(cpu=True)
        model, optimizer = helper.prepare(module, equal.optimizer(module))
        for images, labels in equal.loader():
            with helper.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                helper.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            pause()

    return Contender(module, train)


def trainer(equal: Equal) -> Contender:
    """The Trainer's fit, as far as it goes without a logger, progress bar and checkpoints."""
    module = equal.network()

    def train(pause: Pause) -> None:
        import lightning
        from lightning.fabric.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch.strategies import DDPStrategy

        quiet()

        class Job(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.module = module

            def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
                images, labels = batch
                return F.cross_entropy(self.module(images), labels)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return equal.optimizer(module)

        class AfterEach(lightning.Callback):
            def on_train_batch_end(self, *_: object) -> None:
                pause()

        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        lightning.Trainer(
            accelerator="cpu", devices=equal.env.world_size, plugins=[TorchElasticEnvironment()],
            strategy=DDPStrategy(process_group_backend="gloo"), use_distributed_sampler=False,
            max_steps=equal.steps, callbacks=[AfterEach()], **dict.fromkeys(off, False),
        ).fit(Job(), equal.loader())  # fmt: skip

    return Contender(module, train)


PEERS: dict[str, Callable[[Equal], Contender]] = {FABRIC: fabric, ACCELERATE: accelerate, TRAINER: trainer}
