"""The training loop. One process or a thousand: the same lines."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch.nn import functional as F

from course_lib.train.data import test_loader, train_loader
from course_lib.train.errors import Diverged
from course_lib.train.evaluate import evaluate
from course_lib.train.job import Job, Microbatch
from course_lib.train.journal import Journal
from course_lib.train.meter import Meter
from course_lib.train.optim import set_rate
from course_lib.train.randomness import seed_step
from course_lib.train.schedule import due, why_stop
from course_lib.train.stopping import StopRequest
from course_lib.train.window import Window


def fit(
    job: Job, journal: Journal, request: StopRequest, beat: Callable[[int], None] = lambda step: None
) -> str | None:
    """Train from step `job.start + 1` to `job.total`; why it stopped before, or None. `beat` hears of each step.

    Raises Diverged, on all ranks, when the loss is not finite: no checkpoint is written from there on.
    """
    config, env, order = job.config, job.env, job.order
    batches = iter(train_loader(config.data, job.data, order, env, job.start + 1, job.total))
    tests = test_loader(config.data, job.data, env)
    meter, window = Meter(job), Window(config.measure, job.folder, env.rank, env.say)
    for step in range(job.start + 1, job.total + 1):
        save = due(step, config.run.save_every, order.per_epoch, job.total) or step == config.run.stop_after
        report = save or step % config.run.log_every == 0
        window.before(step)
        lr = set_rate(config.optim, job.optimizer, step, job.total, order.per_epoch, order.global_batch)
        losses = gradients(job, step, meter.fetch(batches, job.microbatches(step)))
        meter.add(losses, order.count(step), norm=job.update(want_norm=report))
        job.average.update()
        window.after(step)
        beat(step)

        if not report:
            continue
        row, stopper = meter.reduce(request.code or journal.code)
        journal.train(step, order.epoch(step), lr, row)
        refuse_nan("training", row["loss"], step, meter)
        stop = why_stop(step, config.run.stop_after, stopper)
        if step % order.per_epoch == 0:
            tested = evaluate(job.module, tests, env.device)
            if job.average.module:
                averaged = evaluate(job.average.module, tests, env.device)
                tested |= {f"average_{name}": averaged[name] for name in ("accuracy", "eval_loss")}
            journal.eval(step, order.epoch(step), tested)
            refuse_nan("test", tested["eval_loss"], step)
        if save or stop:
            journal.save(step, job)
        if stop and step < job.total:
            window.close(step)
            return stop
        beat(step)  # evaluation and saving may have taken long
        meter.restart()
    window.close(job.total)
    return None


def refuse_nan(which: str, loss: float, step: int, meter: Meter | None = None) -> None:
    """Raise Diverged for a loss that is nan or infinite; `loss` is that of all ranks, the same on each.

    The meter knows in which step since the last row it began, and on which rank.
    """
    if not math.isfinite(loss):
        step, first = meter.first_nan(step) if meter else (step, "")
        raise Diverged(f"the {which} loss is {loss} at step {step}; {first}a smaller --optim.lr may help")


def gradients(job: Job, step: int, parts: Iterable[Microbatch]) -> list[torch.Tensor]:
    """Gradients of the mean loss over all samples of a step on all ranks; this rank's sums of losses, one a microbatch.

    Gradients of microbatches add up, and only the last backward averages them over the ranks.
    """
    count, losses = job.order.count(step), []
    for number, (images, labels, last) in enumerate(parts):
        seed_step(job.config.run.seed, step, job.env.rank, job.env.device, number)
        with nullcontext() if last else job.model.no_sync():  # DDP wants the forward in there, too
            losses.append(backward(job, images, labels, count))
    return losses


def backward(job: Job, images: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """The part of a microbatch in the gradients of the mean loss over `count` samples; returns its sum of losses.

    DDP divides the sum of the ranks' gradients by the world size. So each rank takes the *sum* over its own
    samples times world size / count: right also when microbatches or ranks have unequal numbers, where a mean of
    means is wrong.
    """
    images = images.to(getattr(torch, job.config.model.dtype))
    if len(labels) == 0:
        return take_part(job, images)
    images, labels = job.mix(images, labels)
    with job.autocast():
        scores = job.model(images)
    smoothing = job.config.optim.label_smoothing
    loss = F.cross_entropy(scores.to(images.dtype), labels, reduction="sum", label_smoothing=smoothing)
    job.scaler.scale(loss * (job.env.world_size / count)).backward()
    return loss.detach()


def take_part(job: Job, nothing: torch.Tensor) -> torch.Tensor:
    """A rank without samples still joins the all-reduce, with gradients of zero.

    Evaluation mode, because BatchNorm cannot take one made-up sample for training.
    """
    job.model.eval()
    loss = job.model(nothing.new_zeros(1, *nothing.shape[1:])).sum() * 0
    job.scaler.scale(loss).backward()
    job.model.train()
    return loss.detach()
