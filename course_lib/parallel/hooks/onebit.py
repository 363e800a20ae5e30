"""One bit for each element: its sign. What that loses is kept and added to the next gradient (error feedback).

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", Interspeech 2014. There each column has two values, for positive and for negative elements; here each
parameter has one, the mean of its absolute values, as in Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.

Signs cannot be added on their way, so they travel by all-gather. Bytes that a rank puts in for a bucket:
ceil(elements / 8) + 4 * parameters. In a ring it sends N - 1 times that, where an exact all-reduce of float32 sends
2(N-1)/N * 4 * elements: from 64 ranks on one bit is no gain any more.
"""

import torch
import torch.distributed as dist
from torch import nn


class OneBit:
    """What the hook remembers: for each parameter what has not been sent yet.

    group     the process group; None: the default one
    feedback  False: forget what was not sent, to see what that does
    """

    def __init__(self, group: dist.ProcessGroup | None = None, feedback: bool = True) -> None:
        self.group, self.feedback = group, feedback
        # By parameter, not by number of the bucket: after its first backward DDP fills its buckets anew.
        self.residual: dict[nn.Parameter, torch.Tensor] = {}


def onebit_hook(state: OneBit, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The average over all ranks of (sign * scale): `model.register_comm_hook(OneBit(), onebit_hook)`."""
    gradients, sizes = bucket.buffer(), [p.numel() for p in bucket.parameters()]
    wanted = gradients.clone()
    for parameter, part in zip(bucket.parameters(), wanted.split(sizes), strict=True):
        if parameter in state.residual:
            part += state.residual[parameter]
    scales = torch.stack([part.abs().mean() for part in wanted.split(sizes)]).float()
    signs = wanted >= 0
    if state.feedback:
        _remember(state, bucket.parameters(), wanted, _times(signs, scales, sizes, wanted.dtype))
    payload = torch.cat([pack(signs), scales.view(torch.uint8)])
    world = dist.get_world_size(state.group)
    everyones = payload.new_empty(world * payload.numel())
    work = dist.all_gather_into_tensor(everyones, payload, group=state.group, async_op=True)

    def decode(_: torch.futures.Future) -> torch.Tensor:
        gradients.zero_()
        for theirs in everyones.view(world, -1):  # all ranks in the same order, so all get the same bits
            packed, scale = theirs.split([theirs.numel() - 4 * len(sizes), 4 * len(sizes)])
            signs = unpack(packed, gradients.numel())
            gradients.add_(_times(signs, scale.clone().view(torch.float32), sizes, gradients.dtype))
        return gradients.div_(world)

    return work.get_future().then(decode)


def _times(signs: torch.Tensor, scales: torch.Tensor, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """+scale where the sign is set, -scale elsewhere; a scale for each parameter."""
    values = torch.repeat_interleave(scales.to(dtype), torch.tensor(sizes, device=scales.device))
    return torch.where(signs, values, -values)


def _remember(state: OneBit, parameters: list[nn.Parameter], wanted: torch.Tensor, sent: torch.Tensor) -> None:
    """Keep what was not sent; but nothing of a gradient with inf or NaN, which would stay for ever."""
    sizes = [p.numel() for p in parameters]
    for parameter, part in zip(parameters, (wanted - sent).split(sizes), strict=True):
        if part.isfinite().all():
            state.residual[parameter] = part


def pack(signs: torch.Tensor) -> torch.Tensor:
    """Eight booleans to a byte, the first in the lowest bit; uint8, ceil(numel / 8) of them."""
    padded = torch.nn.functional.pad(signs.to(torch.uint8), (0, -signs.numel() % 8)).view(-1, 8)
    packed = torch.zeros_like(padded[:, 0])
    for bit in range(8):
        packed |= padded[:, bit] << bit
    return packed


def unpack(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """The first `numel` booleans that `pack` packed."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> bits) & 1).bool().flatten()[:numel]
