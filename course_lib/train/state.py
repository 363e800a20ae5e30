"""What a checkpoint holds, and how a run goes on from it.

step, world_size      randomness and data order are functions of the step, so nothing else is needed for them
model, average        keys of the bare network: no "module." of DDP, no "_orig_mod." of torch.compile
optimizer             as of the plain optimizer, also with ZeRO-1; so a run may go on with it or without
scaler                of fp16
"""

from typing import Any

from course_lib.train import checkpoint
from course_lib.train.errors import ConfigError
from course_lib.train.job import Job


def collect(job: Job, step: int) -> dict[str, Any]:
    """The state after a step, on rank 0, and {} elsewhere. All ranks call it: with ZeRO-1 each has a part."""
    if job.config.optim.zero:
        job.optimizer.consolidate_state_dict(to=0)
    if not job.env.first:
        return {}
    state = {
        "step": step,
        "world_size": job.env.world_size,
        "model": job.module.state_dict(),
        "optimizer": job.optimizer.state_dict(),
    }
    if job.scaler.is_enabled():
        state["scaler"] = job.scaler.state_dict()
    if job.average.module:
        state["average"] = job.average.module.state_dict()
    return state


def restore(job: Job) -> int:
    """Load the newest checkpoint into the job; the number of steps done."""
    state = checkpoint.load(job.folder, job.env)
    if state is None:
        return 0
    if state["step"] > job.total:
        raise ConfigError(
            f"{job.folder} has done {state['step']} steps, more than the {job.total} of this launch; "
            "give more --optim.epochs."
        )
    job.module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    if job.scaler.is_enabled():
        job.scaler.load_state_dict(state["scaler"])
    job.average.resume(state.get("average", {}), state["step"])
    announce(job, state)
    return state["step"]


def announce(job: Job, state: dict[str, Any]) -> None:
    """Say what keeps this launch from going on with the very same bits."""
    if state["world_size"] != job.env.world_size:
        job.env.say(
            f"The checkpoint comes from {state['world_size']} ranks and {job.env.world_size} continue: the same "
            "samples in each step, but sums in another order, so the last bits differ."
        )
    if job.config.ddp.comm_hook in ("powersgd", "onebit"):
        job.env.say(
            f"The comm hook {job.config.ddp.comm_hook} carries what it could not send from step to step; that is in no "
            "checkpoint and begins at zero, so this run goes on a little differently."
        )
