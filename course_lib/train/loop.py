"""The training loop. One process or a thousand: the same lines."""

import math

import torch
from torch.nn import functional as F

from course_lib.train.data import test_loader, train_loader
from course_lib.train.errors import Diverged
from course_lib.train.evaluate import evaluate
from course_lib.train.journal import Journal
from course_lib.train.metrics import Meter
from course_lib.train.optim import set_rate
from course_lib.train.prepare import Job
from course_lib.train.randomness import seed_step
from course_lib.train.schedule import due, why_stop
from course_lib.train.stopping import StopRequest


def fit(job: Job, journal: Journal, request: StopRequest) -> str | None:
    """Train from step `job.start + 1` to `job.total`; why it stopped before, or None.

    Raises Diverged, on all ranks, when the loss is not finite: no checkpoint is written from there on.
    """
    config, env, order = job.config, job.env, job.order
    batches = iter(train_loader(config.data, job.data, order, env, job.start + 1, job.total))
    tests = test_loader(config.data, job.data, env)
    meter = Meter(env.device)
    for step in range(job.start + 1, job.total + 1):
        images, labels = meter.wait(batches)
        lr = set_rate(config.optim, job.optimizer, step, job.total, order.per_epoch)
        seed_step(config.run.seed, step, env.rank, env.device)
        meter.add(backward(job, images, labels, order.count(step)), order.count(step))
        job.optimizer.step()
        job.optimizer.zero_grad()

        save = due(step, config.run.save_every, order.per_epoch, job.total) or step == config.run.stop_after
        if not save and step % config.run.log_every:
            continue
        row, stopper = meter.reduce(request.number, env.rank, env.world_size)
        journal.train(step, order.epoch(step), lr, row)
        refuse_nan("training", row["loss"], step)
        stop = why_stop(step, config.run.stop_after, stopper)
        if step % order.per_epoch == 0:
            tested = evaluate(job.module, tests, env.device)
            journal.eval(step, order.epoch(step), tested)
            refuse_nan("test", tested["eval_loss"], step)
        if save or stop:
            journal.save(step, job)
        if stop and step < job.total:
            return stop
        meter.restart()
    return None


def refuse_nan(which: str, loss: float, step: int) -> None:
    """Raise Diverged for a loss that is nan or infinite; `loss` is that of all ranks, the same on each."""
    if not math.isfinite(loss):
        raise Diverged(f"the {which} loss is {loss} at step {step}; a smaller --optim.lr may help")


def backward(job: Job, images: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """Gradients of the mean loss over the `count` samples of all ranks; returns this rank's sum of losses.

    DDP divides the sum of the ranks' gradients by the world size. So each rank takes the *sum* over its own
    samples times world size / count: right also when ranks have unequal numbers, where a mean of means is
    wrong.
    """
    images = images.to(next(job.module.parameters()).dtype)
    if len(labels) == 0:
        return take_part(job, images)
    smoothing = job.config.optim.label_smoothing
    loss = F.cross_entropy(job.model(images), labels, reduction="sum", label_smoothing=smoothing)
    (loss * (job.env.world_size / count)).backward()
    return loss.detach()


def take_part(job: Job, nothing: torch.Tensor) -> torch.Tensor:
    """A rank without samples still joins the all-reduce, with gradients of zero.

    Evaluation mode, because BatchNorm cannot take one made-up sample for training.
    """
    job.model.eval()
    loss = job.model(nothing.new_zeros(1, *nothing.shape[1:])).sum() * 0
    loss.backward()
    job.model.train()
    return loss.detach()
