"""PowerSGD, torch's own: each gradient matrix is sent as the product of two thin ones.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019. Bytes that a rank puts into all-reduces, once it has begun: of a tensor with n rows and m = numel / n columns
(n + m) * rank elements where that is at most half of n * m, and all n * m elsewhere (biases, narrow layers).
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


def make_state(group: dist.ProcessGroup, rank: int, start: int) -> PowerSGDState:
    """Of error feedback and warm start; the first `start` steps are averaged exactly."""
    return PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=start)


def powersgd_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, made safe for gloo.

    It starts its second and third all-reduce in callbacks. Those of gloo run in a thread of their own, so with two
    buckets a rank may start the second all-reduce of one before or after the first one of the other, and ranks then add
    what does not belong together: a crash, or wrong sums. So here, unless NCCL keeps the order, one bucket is finished
    before the next begins; nothing overlaps with backward.

    An infinite or NaN gradient spoils its step, on all ranks. torch's hook keeps it in its memory, and so spoils all
    steps to come; here that memory of the bucket is dropped. Not with NCCL, where looking would stop the GPU.
    """
    done = torchs.powerSGD_hook(state, bucket)
    if dist.get_backend(state.process_group) != "nccl" and not done.wait().isfinite().all():
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.pop(bucket.index(), None)
    return done
