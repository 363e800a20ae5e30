"""Exercise 07, first part: what can be wrong in an update, in the evidence. Each look gives None when all is well."""

from collections import Counter

from course_lib.check.group import TALK, Evidence, Wrong
from course_lib.check.specs.torch_ddp_oracle import Update, differ, gradient_bytes, right_updates
from course_lib.launch import Message

EXTRA = 512  # bytes besides gradients that may be: counts of samples, losses to print. Fewer than the gradients have
MADE = "torch_ddp_drive.py, "  # where DDP is made


def updates(e: Evidence, number: int) -> list[list[Update]]:
    """[update][rank]: what the ranks did."""
    found = []
    for rank, answer in enumerate(e.answers[number]):
        for k, steps in enumerate(answer.facts["steps"]):
            grads = [answer.tensors[f"grad {k} {step}"] for step in range(steps)]
            found.append((k, rank, Update(grads, answer.tensors[f"weights {k}"])))
    return [[u for k, _, u in found if k == wanted] for wanted in range(len(e.answers[number][0].facts["steps"]))]


def values(e: Evidence) -> Wrong | None:
    """The first update whose gradients or weights are not those of one process on all samples."""
    for number in e.numbers():
        case = e.cases[number]
        right = right_updates(case, e.answers[number][0].tensors["start"])
        for k, (of_ranks, want) in enumerate(zip(updates(e, number), right, strict=True)):
            for rank, got in enumerate(of_ranks):
                where = f"{case.story}: update {k}, rank {rank}: "
                if len(got.grads) != 1:
                    return Wrong("values", f"{where}optimizer.step() was called {len(got.grads)} times.", number)
                if text := differ(got.grads[0], want.grads[0], "the gradient"):
                    return Wrong("values", f"{where}when the optimizer steps, {text}", number)
                if text := differ(got.weights, want.weights, "the weights"):
                    return Wrong("values", f"{where}after it, {text}", number)
    return None


def memory(e: Evidence) -> Wrong | None:
    """One microbatch at a time: else the batch might as well not have been cut."""
    for number in e.numbers():
        case = e.cases[number]
        for rank, answer in enumerate(e.answers[number]):
            for k, passes in enumerate(answer.facts["passes"]):
                where, most = f"{case.story}: update {k}, rank {rank}: ", max(case.options["sizes"][rank][k])
                for samples, unused, used in passes:
                    if samples > most:
                        text = f"{samples} samples went through the model in one forward; its longest microbatch has"
                        return Wrong("memory", f"{where}{text} {most}.", number)
                    if unused + used:
                        text = f"when a forward of {samples} samples began, the graph of {unused + used} more was held,"
                        more = "which had had no backward yet" if unused else "after its backward"
                        return Wrong("memory", f"{where}{text} {more}.", number)
    return None


def traffic(e: Evidence) -> Wrong | None:
    """The gradients travel once an update."""
    for number in e.numbers():
        case = e.cases[number]
        count = len(e.answers[number][0].facts["steps"])
        for rank in range(case.world):
            sums = [m.nbytes for m in e.messages[number] if m.rank == rank and m.op == "all_reduce"]
            sent = sum(sums) - gradient_bytes()  # of the backward that came before, so that buckets are final
            if sent > count * (gradient_bytes() + EXTRA):
                return Wrong(
                    "traffic",
                    f"{case.story}: in {count} updates rank {rank} put {sent} bytes into all-reduces; the gradients "
                    f"have {gradient_bytes()} bytes, and should travel once an update.",
                    number,
                )
            other = [m for m in e.messages[number] if m.rank == rank and _by_other_ways(m)]
            if sum(m.nbytes for m in other) > count * EXTRA:
                most = max(other, key=lambda m: m.nbytes)
                text = f"rank {rank} sends {most.nbytes} bytes by {most.op} ({most.where})"
                detail = "Gradients, and nothing else of their size, travel through DDP's all-reduce."
                return Wrong("traffic", f"{case.story}: {text}.", number, detail)
    return None


def few(e: Evidence) -> Wrong | None:
    """No barrier, and one small collective an update beside the gradients."""
    for number in e.numbers():
        count = len(e.answers[number][0].facts["steps"])
        for rank in range(e.cases[number].world):
            small = _small(e, number, rank)
            if waits := [m for m in small if "barrier" in m.op]:
                text = f"rank {rank} calls {waits[0].op} ({waits[0].where})"
                return Wrong("small", f"{e.cases[number].story}: {text}.", number)
            if len(small) > count:
                kinds = Counter((m.op, m.nbytes, m.where) for m in small)
                told = ", ".join(f"{n} times {op} of {size} bytes ({at})" for (op, size, at), n in kinds.most_common())
                text = f"in {count} update{'s' * (count > 1)} rank {rank} makes {len(small)} calls beside the gradients"
                return Wrong("small", f"{e.cases[number].story}: {text}, and {count} would do: {told}.", number)
    return None


def _small(e: Evidence, number: int, rank: int) -> list[Message]:
    """The collectives of a rank that are not needed for the gradients: these are the all-reduces with most bytes."""
    own = [m for m in e.messages[number] if m.rank == rank and not m.where.startswith(MADE) and m.op not in TALK]
    sums = sorted((m for m in own if m.op == "all_reduce"), key=lambda m: -m.nbytes)
    rest = len(e.answers[number][0].facts["steps"]) * gradient_bytes()
    while sums and rest > 0:
        rest -= sums.pop(0).nbytes
    return [*sums, *(m for m in own if m.op != "all_reduce")]


def _by_other_ways(m: Message) -> bool:
    """Neither an all-reduce nor what DDP sends when it is made."""
    return m.op not in ("all_reduce", "barrier") and "recv" not in m.op and not m.where.startswith(MADE)


def calls(e: Evidence, number: int) -> float:
    """Calls of rank 0 in an update, on average."""
    own = [m for m in e.messages[number] if m.rank == 0 and not m.where.startswith(MADE)]
    return len(own) / len(e.answers[number][0].facts["steps"])


def growing(e: Evidence) -> Wrong | None:
    """Four microbatches need no more messages than one."""
    many, single = (next(iter(e.numbers(group=group)), None) for group in ("uneven", "single"))
    if many is None or single is None or calls(e, many) <= calls(e, single):
        return None
    text = (
        f"{e.cases[many].story}: rank 0 makes {calls(e, many):g} calls an update, and {calls(e, single):g} "
        "when there is 1 microbatch."
    )
    return Wrong("calls", text, many)
