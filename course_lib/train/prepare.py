"""From a configuration to everything the loop needs. Nothing is written before all of it is known to fit."""

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.parallel.ddp import gradient_bytes, wrap
from course_lib.train import checkpoint, model, optim
from course_lib.train.config import Config, as_json
from course_lib.train.data import Data, check_size
from course_lib.train.environment import Environment
from course_lib.train.errors import ConfigError
from course_lib.train.folder import default_dir, open_folder
from course_lib.train.order import Order
from course_lib.train.sources import open_data


@dataclass
class Job:
    """All that `loop.fit` works with. `start` steps are done already, `total` is the last step."""

    config: Config
    env: Environment
    data: Data
    module: nn.Module  # the bare network
    model: DistributedDataParallel  # the same, with gradients averaged over the ranks
    optimizer: torch.optim.Optimizer
    order: Order
    start: int
    total: int
    folder: Path
    lock: IO[str] | None  # rank 0 holds it as long as the process lives


def prepare(config: Config, env: Environment) -> Job:
    """Open the data, build the network, open the run folder and continue from its newest checkpoint."""
    data = open_data(config.data, config.run.seed, env)
    order = Order(config.run.seed, len(data.train), config.data.global_batch, config.data.drop_last)
    total = 0
    with env.together():
        check_size(config.data, data, env.world_size)
        module = model.build(config.model, data.shape, data.classes, config.run.seed)
        check_single(module, order, data, env.world_size)
        total = config.optim.epochs * order.per_epoch
    config = replace(config, run=replace(config.run, dir=env.share(config.run.dir or default_dir(config.recipe))))
    folder, held = config.run.dir, None
    with env.together():
        if env.first:
            held = open_folder(folder, facts(config, env, data, module, order, total))
    module.to(env.device)
    dtype = getattr(torch, config.model.dtype)
    wrapped = wrap(module, torch.zeros(2, *data.shape, dtype=dtype, device=env.device))
    optimizer = optim.build(config.optim, module)
    start = restore(folder, env, module, optimizer, total)
    return Job(config, env, data, module, wrapped, optimizer, order, start, total, folder, held)


def check_single(module: nn.Module, order: Order, data: Data, world_size: int) -> None:
    """Raise ConfigError when some rank gets a single sample in a step and the network's BatchNorm cannot take it."""
    normed = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())
    if not normed or 1 not in order.share_sizes(world_size):
        return
    trial = copy.deepcopy(module).train()
    try:
        trial(torch.zeros(1, *data.shape, dtype=next(trial.parameters()).dtype))
    except ValueError as error:
        raise ConfigError(
            f"Some ranks would get a single sample in a step (the last of an epoch has "
            f"{order.count(order.per_epoch)} samples for {world_size} ranks), and BatchNorm needs at least two; "
            "use another --data.global_batch, or --data.drop_last."
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


def restore(folder: Path, env: Environment, module: nn.Module, optimizer: torch.optim.Optimizer, total: int) -> int:
    """Load the newest checkpoint into the network and the optimizer; the number of steps done."""
    state = checkpoint.load(folder, env)
    if state is None:
        return 0
    if state["step"] > total:
        raise ConfigError(
            f"{folder} has done {state['step']} steps, more than the {total} of this launch; give more --optim.epochs."
        )
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if state["world_size"] != env.world_size:
        env.say(
            f"The checkpoint comes from {state['world_size']} ranks and {env.world_size} continue: the same "
            "samples in each step, but sums in another order, so the last bits differ."
        )
    return state["step"]
