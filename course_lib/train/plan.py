"""Every derived number, printed once before the first step."""

from course_lib.parallel.ddp import gradient_bytes
from course_lib.train.prepare import Job


def plan(job: Job) -> str:
    """The plan in words, one line for each thing."""
    config, env, data, order = job.config, job.env, job.data, job.order
    optim = config.optim
    per_rank = config.data.global_batch // env.world_size
    last = order.count(order.per_epoch)
    tail = "" if last == config.data.global_batch else f", the last one of an epoch has {last}"
    megabytes = gradient_bytes(job.module) / 2**20
    parameters = sum(p.numel() for p in job.module.parameters())
    lines = {
        "recipe": config.recipe,
        "data": f"{data.name}: {len(data.train):,} to train, {len(data.test):,} to test, "
        f"{' x '.join(map(str, data.shape))}, {data.classes} classes",
        "global batch": f"{config.data.global_batch} = {per_rank} per rank x {env.world_size} ranks{tail}",
        "steps": f"{order.per_epoch} an epoch x {optim.epochs} epochs = {job.total}"
        + (f", {job.start} are done" if job.start else ""),
        "learning rate": f"{optim.name}, 0 to {optim.lr:g} in {optim.warmup_epochs:g} epochs, "
        f"then a cosine to {optim.lr * optim.final_lr:g}",
        "network": f"{config.model.name}, {parameters:,} parameters, {config.model.dtype}",
        "gradients": f"{megabytes:.2f} MiB an all-reduce, one all-reduce a step",
        "device": f"{env.device.type}, backend {env.backend}",
        "run folder": str(job.folder),
    }
    if data.note:
        lines["note"] = data.note
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items())
