"""An exact average by the course's own all-reduce, over whatever transport, while backward goes on.

Bytes that rank r sends for a bucket: `Communicator.bytes_sent(numel, itemsize)`; by ring 2(N-1)/N of the bucket.
"""

from concurrent.futures import Future

import torch
import torch.distributed as dist

from course_lib.collectives import Communicator
from course_lib.parallel.link import OwnLink


class Own:
    """What the hook needs: a communicator, which it serves by a thread, and memory for each bucket.

    Over shared memory a bucket is first copied to where the other ranks can read it, and then sent without any copy:
    one copy for each rank instead of one for each step of the ring. It takes the memory of all gradients once more.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.link = OwnLink(communicator)
        self._shares = hasattr(communicator.transport, "empty")
        self._memory: dict[int, torch.Tensor] = {}

    def place(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        """A tensor with these gradients that is good to send from: themselves, or a copy."""
        if not self._shares or gradients.is_cuda:
            return gradients
        kept = self._memory.get(index)
        if kept is None or kept.shape != gradients.shape or kept.dtype != gradients.dtype:
            kept = self._memory[index] = self.link.empty(gradients.numel(), gradients.dtype, gradients.device)
        return kept.copy_(gradients)

    def close(self) -> None:
        """End the thread."""
        self.link.close()


def own_hook(state: Own, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Let the thread average the bucket: `model.register_comm_hook(Own(communicator), own_hook)`.

    What goes wrong there, for example a rank that does not answer, is raised by `backward()`.
    """
    tensor = state.place(bucket.index(), bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else [])

    def tell(sum_: Future) -> None:
        if error := sum_.exception():
            done.set_exception(error)
        else:
            done.set_result(tensor)  # DDP copies it into the gradients

    state.link.start(tensor, "mean").future.add_done_callback(tell)
    return done
