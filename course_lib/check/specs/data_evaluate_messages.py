"""Exercise 08, second part: what `evaluate` sends: the buffers and a few sums, and what people send beside them."""

from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.data_evaluate import WORLD, network
from course_lib.launch import Message

OBJECT = 2048  # bytes that pickles of buffers and sums may have beside their numbers
JITTER = 8  # bytes by which two pickles of the same kind may differ
MADE = "data_evaluate.py, "  # where DDP is made


def calls(e: Evidence, number: int, rank: int) -> list[Message]:
    """What a rank sent in a case, without what DDP sends when it is made."""
    return [m for m in e.messages.get(number, ()) if m.rank == rank and not m.where.startswith(MADE)]


def buffer_bytes() -> int:
    """Of the model."""
    return sum(buffer.nbytes for buffer in network(0, 0).buffers())


def messages(e: Evidence) -> Wrong | None:
    """Buffers and sums: the same calls and bytes, whatever the number of samples and batches."""
    for rank in range(WORLD):
        found = {number: calls(e, number, rank) for number in e.numbers()}
        sent = {number: sum(m.nbytes for m in own) for number, own in found.items()}
        for number, own in found.items():
            if waits := [m for m in own if "barrier" in m.op]:
                text = f"{e.cases[number].story}: rank {rank} calls {waits[0].op} ({waits[0].where})."
                return Wrong("messages", text, number)
        counts = {number: len(own) for number, own in found.items()}
        shared = {n: nbytes for n, nbytes in sent.items() if len(e.cases[n].inputs[0]) >= WORLD}  # all have samples
        for counted, what, slack in ((counts, "makes {} calls", 0), (shared, "sends {} bytes", JITTER)):
            few, many = min(counted, key=counted.get, default=0), max(counted, key=counted.get, default=0)
            if counted and counted[many] > counted[few] + slack:
                text = f"{e.cases[many].story}: rank {rank} {what.format(counted[many])}, and {counted[few]} with "
                other = f"{len(e.cases[few].inputs[0])} samples, batch_size={e.cases[few].options['batch_size']}."
                return Wrong("messages", text + other, many)
        for number, own in found.items():
            if sent[number] > 2 * buffer_bytes() + OBJECT:
                most = max(own, key=lambda m: m.nbytes)
                text = f"rank {rank} sends {sent[number]} bytes, {most.nbytes} of them by {most.op} ({most.where})"
                text = f"{e.cases[number].story}: {text}; the buffers have {buffer_bytes()}."
                return Wrong("messages", text, number)
    return None


def sends_parameters(e: Evidence, wrong: Wrong) -> str | None:
    if "the buffers have" in wrong.text:
        return (
            "That is more than all buffers and a few sums: are parameters among it? DDP made them equal when the model "
            "was wrapped, and equal averages keep them so. Only the buffers differ between ranks."
        )
    return None


def barrier(e: Evidence, wrong: Wrong) -> str | None:
    if "barrier" in wrong.text:
        return (
            "A barrier carries nothing, and all wait for the slowest. The sum waits for all ranks anyway: leave it out."
        )
    return None


def sums_each_batch(e: Evidence, wrong: Wrong) -> str | None:
    if " calls, and " in wrong.text:
        return (
            "Something is sent for each batch, and each call waits for the slowest rank. Add up on this rank over all "
            "batches, and once over all ranks, at the end."
        )
    return None


def sends_every_sample(e: Evidence, wrong: Wrong) -> str | None:
    if " bytes, and " in wrong.text:
        return (
            "What is sent grows with the test set: scores, or what was right, sample by sample. Three numbers are "
            "enough, whatever its size: right answers, samples, and the sum of losses."
        )
    return None


OF_MESSAGES = (sends_parameters, barrier, sums_each_batch, sends_every_sample)
