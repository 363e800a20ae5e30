"""What a run gives back: the values, the output, and every message between the ranks."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One call of `torch.distributed` on one rank: a send, a receive or a collective.

    Times are seconds since the ranks began the function together. For an asynchronous call `start` is the call
    and `end` the return of its `wait()`; `end` is None when it never finished.
    """

    rank: int  # who called
    op: str  # the name in torch.distributed: "send", "irecv", "all_reduce", "barrier", ...
    peer: int | None  # global rank of the other side of a send or receive; source or destination rank of a
    # broadcast, reduce, gather or scatter; None for the symmetric collectives
    nbytes: int  # bytes that this rank puts in: numel * element_size (0 for a barrier); of an object, its pickle's
    start: float
    end: float | None
    where: str  # "Cell In[3], line 7", or "file.py, line 7"
    tag: int = 0  # of a send or receive
    ranks: tuple[int, ...] = ()  # global ranks of the group that takes part


@dataclass
class Result:
    """What `run` returns.

    results[k]   what the function returned on rank k
    output[k]    what rank k printed
    messages     every send, receive and collective of every rank, by start time; what DDP sends from C++ too
    seconds      time the slowest rank spent in the function (the start of the processes is not counted)
    zero         the moment of time.monotonic() from which the times of the messages count
    """

    results: list[Any]
    output: list[str]
    messages: list[Message] = field(repr=False)
    seconds: float = 0.0
    zero: float = field(default=0.0, repr=False)

    @property
    def ranks(self) -> int:
        """How many ranks ran."""
        return len(self.results)

    def __repr__(self) -> str:
        sent = sum(m.nbytes for m in self.messages if m.op in ("send", "isend"))
        return (
            f"<Result: {self.ranks} rank{'s' * (self.ranks > 1)}, {self.seconds:.3f} s, {len(self.messages)} messages, "
            f"{sent} bytes sent point to point>"
        )
