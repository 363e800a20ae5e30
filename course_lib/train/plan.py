"""Every derived number, printed once before the first step."""

from course_lib.parallel.ddp import gradient_bytes
from course_lib.train.job import Job
from course_lib.train.metrics import read_rows
from course_lib.train.optim import peak_rate


def plan(job: Job) -> str:
    """The plan in words, one line for each thing."""
    config, env, data, order = job.config, job.env, job.data, job.order
    parameters = sum(p.numel() for p in job.module.parameters())
    buckets = "MiB in all-reduces" if config.ddp.comm_hook == "none" else f"MiB by the hook {config.ddp.comm_hook}"
    lines = {
        "recipe": config.recipe,
        "data": f"{data.name}: {len(data.train):,} to train, {len(data.test):,} to test, "
        f"{' x '.join(map(str, data.shape))}, {data.classes} classes",
        "global batch": global_batch(job),
        "steps": f"{order.per_epoch} an epoch x {config.optim.epochs} epochs = {job.total}"
        + (f", {job.start} are done" if job.start else ""),
        "learning rate": learning_rate(job),
        "network": f"{config.model.name}, {parameters:,} parameters, {config.model.dtype}"
        + ("" if config.amp.dtype == "none" else f", computed in {config.amp.dtype}"),
        "gradients": f"{gradient_bytes(job.module) / 2**20:.2f} {buckets}, once a step",
        "memory": f"{state_bytes(job) / 2**20:.2f} MiB a rank without activations: weights, gradients, optimizer",
        "device": f"{env.device.type}, backend {env.backend}",
        "run folder": str(job.folder),
    }
    if job.part_of_peak:
        lines["at 100% MFU"] = f"{env.world_size / job.part_of_peak:,.0f} samples/s would use the whole peak"
    if expected := hours_left(job):
        lines["expected"] = expected
    if data.note:
        lines["note"] = data.note
    return "\n".join(f"{name:>13}  {text}" for name, text in lines.items())


def global_batch(job: Job) -> str:
    """The product, and what the last step of an epoch has."""
    data, last = job.config.data, job.order.count(job.order.per_epoch)
    times = f" x {data.accumulate} microbatches" if data.accumulate > 1 else ""
    tail = "" if last == data.global_batch else f", the last one of an epoch has {last}"
    return f"{data.global_batch} = {data.batch} per rank x {job.env.world_size} ranks{times}{tail}"


def learning_rate(job: Job) -> str:
    """The curve of the rate, and by which rule its peak was scaled."""
    optim = job.config.optim
    peak, rule = peak_rate(optim, job.order.global_batch), ""
    if optim.reference_batch:
        power = "square root of the batch" if optim.name == "adamw" else "batch"
        rule = f" ({optim.lr:g} for {optim.reference_batch}, scaled with the {power})"
    zero = ", ZeRO-1" if optim.zero else ""
    return (
        f"{optim.name}{zero}, 0 to {peak:g}{rule} in {optim.warmup_epochs:g} epochs, "
        f"then a cosine to {peak * optim.final_lr:g}"
    )


def state_bytes(job: Job) -> int:
    """Bytes of a rank that stay from step to step, activations and what the backend needs left out.

    Weights, gradients, DDP's buckets unless gradients are views of them, the optimizer's state (1 or 2 numbers a
    parameter; with ZeRO-1 a part of them), the average of the weights.
    """
    optim, gradients = job.config.optim, gradient_bytes(job.module)
    weights = sum(t.numel() * t.element_size() for t in (*job.module.parameters(), *job.module.buffers()))
    buckets = 0 if job.config.ddp.gradient_as_bucket_view else gradients
    kept = 2 if optim.name == "adamw" else int(optim.momentum > 0)
    ranks = job.env.world_size if optim.zero else 1
    return weights * (2 if optim.average else 1) + gradients + buckets + kept * gradients // ranks


def hours_left(job: Job) -> str:
    """How long the rest will take, by the median speed that this run had before with as many ranks; else nothing."""
    speeds, alike = [], False
    for row in read_rows(job.folder / "metrics.jsonl"):
        if row["event"] == "start":
            alike = row["ranks"] == job.env.world_size
        elif row["event"] == "train" and alike:
            speeds.append(row["samples_per_s"])
    if not speeds or job.start == job.total:
        return ""
    median = sorted(speeds)[len(speeds) // 2]
    samples = sum(job.order.count(step) for step in range(job.start + 1, job.total + 1))
    return f"{samples / median / 3600:.2g} hours of training for the rest, at the {median:,.0f} samples/s so far"
