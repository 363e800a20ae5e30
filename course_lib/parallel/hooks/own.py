"""An exact average by the course's own all-reduce, over whatever transport, while backward goes on.

Bytes that rank r sends for a bucket: `Communicator.bytes_sent(numel, itemsize)`; by ring 2(N-1)/N of the bucket.
"""

from concurrent.futures import Future

import torch
import torch.distributed as dist

from course_lib.parallel.link import OwnLink


def own_hook(state: OwnLink, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Let the link's thread average the bucket in place: `model.register_comm_hook(OwnLink(communicator), own_hook)`.

    What goes wrong there, for example a rank that does not answer, is raised by `backward()`.
    """
    gradients = bucket.buffer()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[gradients.device] if gradients.is_cuda else []
    )

    def tell(sum_: Future) -> None:
        if error := sum_.exception():
            done.set_exception(error)
        else:
            done.set_result(gradients)

    state.start(gradients, "mean").future.add_done_callback(tell)
    return done
