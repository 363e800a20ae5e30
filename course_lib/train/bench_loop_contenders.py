"""The contenders of `course bench loop` that need nothing installed: a bare DDP loop, and the course's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib.train.bench_loop_job import Equal
from course_lib.train.heartbeat import heartbeat
from course_lib.train.journal import Journal
from course_lib.train.loop import fit
from course_lib.train.prepare import assemble
from course_lib.train.stopping import StopRequest

Pause = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """The network that is trained, unwrapped, and `train(pause)`: the whole run, which pauses after each step."""

    module: nn.Module
    train: Callable[[Pause], None]


def bare(equal: Equal) -> Contender:
    """What one writes by hand when nothing but the training matters."""
    module = equal.network()

    def train(pause: Pause) -> None:
        model = DistributedDataParallel(module)
        optimizer = equal.optimizer(module)
        for images, labels in equal.loader():
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pause()

    return Contender(module, train)


def ours(equal: Equal, folder: Path, log_every: int) -> Contender:
    """`course_lib.train` as it runs in production, with journal, heartbeat and the checkpoint at the end."""
    module = equal.network()
    config = replace(equal.config, run=replace(equal.config.run, log_every=log_every, dir=folder))

    def train(pause: Pause) -> None:
        job = assemble(config, equal.env, equal.data, module, equal.order)
        job.total, job.folder = equal.steps, folder
        run, env, last = config.run, equal.env, 0

        def beat(step: int) -> None:
            nonlocal last
            heart.beat(step)
            if step > last:  # a step with a row beats twice
                last = step
                pause()

        with heartbeat(folder, env.rank, env.world_size, run.stall, run.timeout) as heart:
            journal = Journal(job, "")
            fit(job, journal, StopRequest(), beat)
            journal.close("finished", "")

    return Contender(module, train)


def end_loss(equal: Equal, module: nn.Module) -> torch.Tensor:
    """The loss of this rank's first batch with the weights as they are at the end; () float32."""
    images, labels = next(iter(equal.loader()))
    module.eval()
    with torch.no_grad():
        return F.cross_entropy(module(images), labels)
