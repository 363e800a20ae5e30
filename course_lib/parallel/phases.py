"""What a rank computed, and what it said to the others, from the raw events of torch.profiler.

"Computed" means: an operator ran. The time inside `backward()` would not do, because a wrapper that waits for
its all-reduces before `backward()` returns spends that time waiting; so would an autograd node, whose hooks may
wait. Operators ("aten::mm") never wait for another rank. They may wait for a core, where ranks share one: that
counts as computing.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.parallel.intervals import Interval, difference, union

KINDS = ("forward", "backward", "optimizer", "other")
_NO_COMPUTE = ("c10d", "_c10d", "autograd::", "torch::", "torch.", "FSDP::")  # beginnings of names
_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_OPERATOR = 0  # the scope of operators; 7 is what record_function marks


@dataclass(frozen=True, slots=True)
class Raw:
    """An event of the profiler, times in seconds."""

    name: str
    start: float
    end: float
    scope: int = _OPERATOR
    thread: int = 0
    device: bool = False  # a GPU's kernel, not the CPU's work
    id: int = 0  # of an operator ...
    launched_by: int = 0  # ... that a kernel belongs to


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time of one kind, in seconds."""

    kind: str
    start: float
    end: float


def steps(raw: Iterable[Raw], begin: float, end: float) -> list[Interval]:
    """From the end of one `optimizer.step()` to the end of the next; without an optimizer all is one step."""
    ends = [stop for _, stop in _optimizer(raw, "Optimizer.step#")]
    return list(zip([begin, *ends], ends, strict=False)) or [(begin, end)]


def compute(raw: Sequence[Raw], backwards: list[Interval], taken: list[Interval] = ()) -> list[Span]:
    """When operators ran, or where there is a GPU its kernels, as spans of the four kinds.

    backwards   when the rank was in `backward()`
    taken       when the thread that computes was in a collective of ours: what it adds there is communication

    Before the last `backward()` of a step everything is "forward" (as long as no optimizer or backward runs),
    after it "other": averaging gradients, copying them, reading the loss.
    """
    optimizer, ends = _optimizer(raw, "Optimizer."), [end for _, end in steps(raw, 0, 0)]
    launches = {event.id: event.start for event in raw if not event.device}
    on_device = [event for event in raw if event.device and not _is_nccl(event)]
    pieces: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    for event in on_device or filter(_computes, raw):
        when = launches.get(event.launched_by, event.start) if event.device else event.start
        pieces[_kind(when, optimizer, backwards, ends)].append((event.start, event.end))
    found = [Span(kind, *piece) for kind, all_of in pieces.items() for piece in difference(all_of, taken)]
    return _sorted(found)


def communication(raw: Iterable[Raw], backwards: list[Interval] = ()) -> list[Span]:
    """The collectives and messages as the backend ran them: "gloo:all_reduce" is a span "all_reduce".

    Gloo's spans begin with the call. They end when its thread has noted that the work is done, however late somebody
    waits for it; on a busy machine the note can come after the news. What torch's DDP started in `backward()` was over
    when that returned, so no such span is longer. Of NCCL it is the kernels that count: the CPU only puts them on a
    stream.
    """
    kernels = [event for event in raw if event.device and _is_nccl(event)]
    if kernels:
        return _sorted(Span(_of_kernel(event.name), event.start, event.end) for event in kernels)
    named = [(*event.name.split(":", 1), event) for event in raw if ":" in event.name]
    found = [Span(op, event.start, event.end) for backend, op, event in named if backend in _BACKENDS]
    if any(event.name == "DistributedDataParallel.forward" for event in raw):
        found = [Span(s.kind, s.start, min([s.end, *(b for a, b in backwards if a <= s.start <= b)])) for s in found]
    return _sorted(found)


def _sorted(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.start)


def _computes(event: Raw) -> bool:
    return event.scope == _OPERATOR and "::" in event.name and not event.name.startswith(_NO_COMPUTE)


def _is_nccl(event: Raw) -> bool:
    return event.name.startswith("nccl")


def _of_kernel(name: str) -> str:
    """The operation in a name like "ncclDevKernel_AllReduce_Sum_f32_RING_LL"."""
    word = name.split("_")[1] if "_" in name else name
    known = {"AllReduce": "all_reduce", "Broadcast": "broadcast", "AllGather": "all_gather", "Reduce": "reduce"}
    return known.get(word, {"ReduceScatter": "reduce_scatter", "SendRecv": "send_recv"}.get(word, word))


def _optimizer(raw: Iterable[Raw], name: str) -> list[Interval]:
    """Optimizers that wrap others leave nested marks: the outermost count."""
    return union((event.start, event.end) for event in raw if not event.device and event.name.startswith(name))


def _kind(when: float, optimizer: list[Interval], backwards: list[Interval], ends: list[float]) -> str:
    if _inside(when, optimizer):
        return "optimizer"
    if _inside(when, backwards):
        return "backward"
    place = bisect_right(ends, when)
    step_end = ends[place] if place < len(ends) else float("inf")
    later = bisect_right(backwards, (when, float("inf")))
    return "forward" if later < len(backwards) and backwards[later][0] < step_end else "other"


def _inside(when: float, pieces: list[Interval]) -> bool:
    place = bisect_right(pieces, (when, float("inf"))) - 1
    return place >= 0 and when < pieces[place][1]
