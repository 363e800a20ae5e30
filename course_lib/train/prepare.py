"""From a configuration to everything the loop needs. Nothing is written before all of it is known to fit."""

import copy
import sys
from dataclasses import replace

import torch
from torch import nn

from course_lib.parallel.ddp import gradient_bytes, wrap
from course_lib.train import flops, model, optim, placement, precision, state, transforms
from course_lib.train.average import Average
from course_lib.train.batches import microbatches, sizes
from course_lib.train.config import Config, as_json
from course_lib.train.data import Data, check_size, settled
from course_lib.train.environment import Environment
from course_lib.train.errors import ConfigError
from course_lib.train.folder import default_dir, open_folder
from course_lib.train.job import Job
from course_lib.train.order import Order
from course_lib.train.sources import open_data
from course_lib.train.update import Update


def prepare(config: Config, env: Environment) -> Job:
    """Open the data, build the network, open the run folder and continue from its newest checkpoint."""
    config = replace(config, data=settled(config.data, env.world_size))
    data = open_data(config.data, config.run.seed, env)
    order = Order(config.run.seed, len(data.train), config.data.global_batch, config.data.drop_last)
    total = 0
    with env.together():
        check_size(config.data, data, env.world_size)
        module = model.build(config.model, data.shape, data.classes, config.run.seed)
        placement.check(config.model, module, env.device, even(order, config.data.batch, env.world_size))
        check_single(module, order, config.data.batch, data, env.world_size)
        total = config.optim.epochs * order.per_epoch
    config = replace(config, run=replace(config.run, dir=env.share(config.run.dir or default_dir(config.recipe))))
    folder, held = config.run.dir, None
    with env.together():
        if env.first:
            held = open_folder(folder, facts(config, env, data, module, order, total))
    job = assemble(config, env, data, module, order)
    job.total, job.folder, job.lock = total, folder, held
    job.start = state.restore(job)
    return job


def assemble(config: Config, env: Environment, data: Data, module: nn.Module, order: Order) -> Job:
    """All parts, on the device, as they are before the first step."""
    module = placement.place(module, config.model, env.device)
    average = Average(module, config.optim.average)  # a copy, so before DDP and the compiler take hold of the network
    part_of_peak = None
    if env.first and (peak := flops.peak(config.measure.peak_tflops, env.device, config.amp.dtype != "none")):
        part_of_peak = flops.count(module, data.shape) / peak
    placement.hasten(module, config.model)
    samples = 2 if config.model.compile == "no" else config.data.batch  # a compiler makes kernels for the size it sees
    dtype = getattr(torch, config.model.dtype)
    example = placement.lay_out(torch.zeros(samples, *data.shape, dtype=dtype, device=env.device), config.model)
    wrapped = wrap(module, example, config.ddp)
    optimizer, scaler = optim.build(config.optim, module), precision.scaler(config.amp, env.device)
    return Job(
        config, env, data, module, wrapped, optimizer, scaler,
        Update(optimizer, scaler, optim.learnable(module), config.optim.clip),
        average, precision.autocast(config.amp, env.device), transforms.mixup(config.data.mixup, data.classes),
        part_of_peak, order,
    )  # fmt: skip


def even(order: Order, batch: int, world_size: int) -> bool:
    """Whether all ranks have equally many microbatches in each step, and none an empty one."""
    shares = order.share_sizes(world_size)
    last = order.count(order.per_epoch)
    of_last = {microbatches(len(range(rank, last, world_size)), batch) for rank in range(world_size)}
    return 0 not in shares and len(of_last) == 1


def check_single(module: nn.Module, order: Order, batch: int, data: Data, world_size: int) -> None:
    """Raise ConfigError when some microbatch is a single sample and the network's BatchNorm cannot take it."""
    normed = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    if not normed or not any(1 in sizes(share, batch) for share in order.share_sizes(world_size)):
        return
    trial = copy.deepcopy(module).train()
    try:
        trial(torch.zeros(1, *data.shape, dtype=next(trial.parameters()).dtype))
    except ValueError as error:
        raise ConfigError(
            f"Some ranks would get a single sample at a time (the last step of an epoch has "
            f"{order.count(order.per_epoch)} samples for {world_size} ranks, {batch} at a time), and BatchNorm needs "
            "at least two; use another --data.global_batch, or --data.drop_last."
        ) from error


def facts(
    config: Config, env: Environment, data: Data, module: nn.Module, order: Order, total: int
) -> dict[str, object]:
    """config.json: what was asked for and what follows from it."""
    return {
        "recipe": config.recipe,
        "config": as_json(config),
        "data": {"name": data.name, "asked": config.data.name, "note": data.note, "train": len(data.train),
                 "test": len(data.test), "shape": list(data.shape), "classes": data.classes},
        "ranks": env.world_size,
        "backend": env.backend,
        "device": env.device.type,
        "steps": total,
        "steps_per_epoch": order.per_epoch,
        "parameters": sum(p.numel() for p in module.parameters()),
        "gradient_bytes": gradient_bytes(module),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }  # fmt: skip
