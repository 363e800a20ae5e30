"""The hook of project.py on real ranks, with gradients that the judge chooses: averages, bits, who sends what."""

import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.check.findings import destroyed, ended_badly, errors, handles, told_apart
from course_lib.check.group import TALK, Evidence, GroupCase, GroupMistake, GroupSpec, Wrong
from course_lib.check.specs.torch_ddp_drive import Linear, NotAFuture
from course_lib.launch import Message

STEPS = 3
LENGTHS = [7, 40, 23, 11]  # of the parameters, used in this order
BUCKET = 20  # elements: more than one bucket
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}


def drive(hook, gradients: torch.Tensor) -> tuple[dict, dict]:
    """In the rank. `gradients`: this rank's, one row for each step; notes the averaged ones, and the buckets."""
    network = Linear(LENGTHS, [0, 1, 2, 3]).to(gradients.dtype)
    model = DistributedDataParallel(network, bucket_cap_mb=BUCKET * gradients.element_size() / 2**20)
    sizes, tensors = [], {}

    def watched(state: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise NotAFuture(f"the hook returned a {type(future).__name__}, not a Future")
        return future

    for _ in range(2):  # then DDP's buckets are final, and it sends nothing more by itself
        model(gradients[0] * 0).backward()
    model.register_comm_hook(model.process_group, watched)
    began = time.monotonic()
    for number, row in enumerate(gradients):
        model.zero_grad()
        model(row).backward()
        tensors[f"grad {number}"] = torch.cat([w.grad.flatten() for w in model.module.weights])
    return {"sizes": sizes, "began": began, "ended": time.monotonic()}, tensors


def cases(rng: random.Random) -> list[GroupCase]:
    """Fresh gradients on 3 and on 2 ranks, in float64 and in the float32 that one trains with."""
    generator, found = torch.Generator().manual_seed(rng.getrandbits(60)), []
    for world, dtype in ((3, torch.float64), (2, torch.float32), (2, torch.float64)):
        shape, kind = (STEPS, sum(LENGTHS)), str(dtype).removeprefix("torch.")
        inputs = tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(world))
        story = f"hook on {world} ranks, {sum(LENGTHS)} {kind} gradients in several buckets"
        found.append(GroupCase("hook", story, inputs, (torch.stack(inputs).mean(0),) * world, drive=drive))
    return found


def seen(e: Evidence, number: int) -> torch.Tensor:
    """What the ranks had as gradients: (ranks, steps, elements)."""
    return torch.stack([torch.stack([a.tensors[f"grad {s}"] for s in range(STEPS)]) for a in e.answers[number]])


def right(e: Evidence, number: int) -> torch.Tensor:
    """What is right, in the same shape."""
    return torch.stack(e.cases[number].expected)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal up to rounding."""
    return bool(((got - want).abs() <= ROUNDING[want.dtype]).all())


def values(e: Evidence) -> Wrong | None:
    """The first gradient that is not the average."""
    for number in e.numbers():
        got, want = seen(e, number), right(e, number)
        if not close(got, want):
            rank, step, at = ((got - want).abs().nan_to_num(9e9) > ROUNDING[want.dtype]).nonzero()[0].tolist()
            is_, wanted = told_apart(got[rank, step, at].item(), want[rank, step, at].item())
            text = f"step {step}, rank {rank}: element {at} of all gradients must be {wanted}, and is {is_}."
            return Wrong("values", f"{e.cases[number].story}: {text}", number)
    return None


def bits(e: Evidence) -> Wrong | None:
    """All ranks must have the same bits, or models drift apart."""
    for number in e.numbers():
        got = seen(e, number)
        if (got != got[:1]).any():
            return Wrong("bits", f"{e.cases[number].story}: the ranks do not have the same bits.", number)
    return None


def calls(e: Evidence, number: int, rank: int) -> list[Message]:
    """What a rank did while the hook was at work."""
    facts, zero = e.answers[number][rank].facts, e.zero[number]
    return [m for m in e.messages[number] if m.rank == rank and facts["began"] <= m.start + zero <= facts["ended"]]


def ready_made(e: Evidence) -> Wrong | None:
    """A collective of torch in place of the ring."""
    for number in e.numbers():
        for rank in range(e.cases[number].world):
            if m := next((m for m in calls(e, number, rank) if m.op not in TALK), None):
                return Wrong("ready_made", f"{e.cases[number].story}: rank {rank} calls {m.op}.", number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """Each rank sends what a ring sends for these buckets: 2(N-1) chunks of each."""
    for number in e.numbers():
        n, sizes = e.cases[number].world, e.answers[number][0].facts["sizes"]
        width = e.cases[number].inputs[0].element_size()
        least, most = (width * 2 * (n - 1) * sum(size // n + more for size in sizes) for more in (0, 1))
        for rank in range(n):
            sent = sum(m.nbytes for m in e.sent(number, rank))
            if not least <= sent <= most:
                text = f"rank {rank} sent {sent} bytes; {len(sizes)} buckets by ring are {least} to {most}."
                return Wrong("traffic", f"{e.cases[number].story}: {text}", number)
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, ready_made, values, handles, ended_badly, bits, traffic):
        if wrong := look(e):
            return wrong
    return None


def sums(e: Evidence, wrong: Wrong) -> str | None:
    if close(seen(e, wrong.case), right(e, wrong.case) * e.cases[wrong.case].world):
        return "That is the sum over the ranks. DDP expects the average from a hook: divide by dist.get_world_size()."
    return None


def divides_twice(e: Evidence, wrong: Wrong) -> str | None:
    if close(seen(e, wrong.case), right(e, wrong.case) / e.cases[wrong.case].world):
        return "That is the average divided by the number of ranks once more: divide once."
    return None


def no_average(e: Evidence, wrong: Wrong) -> str | None:
    if close(seen(e, wrong.case), torch.stack(e.cases[wrong.case].inputs)):
        return (
            "Each rank has its own gradients still. The sum must end in the tensor that the Future has: sum "
            "bucket.buffer() in place, and give it, divided, to Future.set_result."
        )
    return None


def not_by_ring(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "ready_made":
        return "This stage is about your own all-reduce: let the hook call ring_all_reduce on bucket.buffer()."
    return (
        "The averages are right, but do not come from ring_all_reduce: let the hook call it on bucket.buffer(), once."
    )


def no_future(e: Evidence, wrong: Wrong) -> str | None:
    if any(a.error == "NotAFuture" for _, a in errors(e)):
        return "A hook returns a torch.futures.Future: make one, and give it the tensor with set_result."
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    number = e.numbers(world=3)[0]
    sent, count = sum(m.nbytes for m in e.sent(number, 0)), len(e.answers[number][0].facts["sizes"])
    by_ring = f"{count} buckets went by ring, {sent} bytes from rank 0"
    return [f"hook averages exactly on 2 and 3 ranks, with the same bits on each; {by_ring}"]


MISTAKES = (
    GroupMistake("not_by_ring", not_by_ring, ("ready_made", "traffic")),
    *(GroupMistake(look.__name__, look, ("values",)) for look in (sums, divides_twice, no_average)),
    GroupMistake("no_future", no_future, ("raised", "ended")),
)
SPEC = GroupSpec("16_project", "hook", 15, cases, compare, MISTAKES, praise, "hook")
