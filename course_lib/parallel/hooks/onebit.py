"""One bit for each element: its sign. What that loses is kept and added to the next gradient (error feedback).

Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs", Interspeech 2014. There each column has two values, for positive and for negative elements; here each
parameter has one, the mean of its absolute values, as in Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.

Signs cannot be added on their way, so they travel by all-gather. Bytes that a rank puts in for a bucket:
ceil(elements / 8) + itemsize * parameters. In a ring it sends N - 1 times that, where an exact all-reduce of float32
sends 2(N-1)/N * 4 * elements: from 64 ranks on one bit is no gain any more.
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
    """The average over all ranks of sign * scale: `model.register_comm_hook(OneBit(), onebit_hook)`."""
    gradients, sizes = bucket.buffer(), [p.numel() for p in bucket.parameters()]
    wanted = gradients.clone()
    for parameter, part in zip(bucket.parameters(), wanted.split(sizes), strict=True):
        if parameter in state.residual:
            part += state.residual[parameter]
    payload = pack(wanted >= 0, torch.stack([part.abs().mean() for part in wanted.split(sizes)]))
    if state.feedback:
        _remember(state, bucket.parameters(), wanted - unpack(payload, sizes, wanted.dtype))
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size(state.group))]
    work = dist.all_gather(everyones, payload, group=state.group, async_op=True)

    def decode(_: torch.futures.Future) -> torch.Tensor:
        gradients.zero_()
        for theirs in everyones:  # all ranks in the same order, so all get the same bits
            gradients.add_(unpack(theirs, sizes, gradients.dtype))
        return gradients.div_(len(everyones))

    return work.get_future().then(decode)


def _remember(state: OneBit, parameters: list[nn.Parameter], unsent: torch.Tensor) -> None:
    """Keep what was not sent; but nothing of a gradient with inf or NaN, which would stay for ever."""
    for parameter, part in zip(parameters, unsent.split([p.numel() for p in parameters]), strict=True):
        if part.isfinite().all():
            state.residual[parameter] = part


def pack(signs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Booleans, eight to a byte, the first in the lowest bit; then the scales as they are.

    One-dimensional uint8 of ceil(numel / 8) + scales.numel() * itemsize bytes.
    """
    padded = torch.nn.functional.pad(signs.to(torch.uint8), (0, -signs.numel() % 8)).view(-1, 8)
    bits = torch.zeros_like(padded[:, 0])
    for place in range(8):
        bits |= padded[:, place] << place
    return torch.cat([bits, scales.view(-1).view(torch.uint8)])


def unpack(payload: torch.Tensor, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Of what `pack` packed: +scale where the sign was set, -scale elsewhere.

    sizes  how many elements each scale is for; their sum is the length of the result
    dtype  of the scales, and of the result
    """
    count, tail = sum(sizes), len(sizes) * dtype.itemsize
    bits, scales = payload.split([payload.numel() - tail, tail])
    places = torch.arange(8, dtype=torch.uint8, device=payload.device)
    signs = ((bits[:, None] >> places) & 1).flatten()[:count].bool()
    lengths = torch.tensor(sizes, device=payload.device)
    values = torch.repeat_interleave(scales.clone().view(dtype), lengths, output_size=count)
    return torch.where(signs, values, -values)
