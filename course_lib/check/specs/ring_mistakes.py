"""The usual mistakes in a ring all-reduce, each with the sentence that names it."""

import torch

from course_lib.check.findings import errors, first_difference, tolerance
from course_lib.check.group import KINDS, Evidence, GroupCase, Wrong
from course_lib.check.known import (
    COMMON_FIRST,
    COMMON_HANDLES,
    COMMON_HANGS,
    buffer_dtype,
    known,
    mismatched,
    right_and_wrong,
    right_worlds,
)
from course_lib.check.specs.ring_copies import copy_not_copied_back, makes_new_tensors, only_reduce_scatter
from course_lib.check.specs.ring_numbers import (
    averages_sums,
    averages_twice,
    divides_each_step,
    forgets_average,
    loses_integers,
    loses_precision,
    values_wrong,
    wrong_divisor,
    wrong_mean,
)
from course_lib.check.specs.ring_steps import (
    adds_in_second_phase,
    off_by_one_step,
    replaces_instead_of_adds,
    wrong_chunk_all_gather,
    wrong_chunk_reduce_scatter,
)


def wrong_neighbour(e: Evidence, wrong: Wrong) -> str | None:
    n = e.cases[wrong.case].world
    talk = [m for m in e.messages.get(wrong.case, ()) if m.peer is not None]
    if n < 3 or not talk:
        return None
    far = next((m for m in talk if (m.peer - m.rank) % n not in (1, n - 1)), None)
    if far:
        verb = "sends to" if "send" in far.op else "receives from"
        return (
            f"Rank {far.rank} {verb} rank {far.peer} ({far.where}). A rank of a ring talks with its neighbours only: "
            f"it sends to ({far.rank} + 1) % {n} and receives from ({far.rank} - 1) % {n}."
        )
    to = {(m.peer - m.rank) % n for m in talk if "send" in m.op}
    source = {(m.peer - m.rank) % n for m in talk if "recv" in m.op}
    if len(to) == 1 and to == source:
        side = "right" if to == {1} else "left"
        return (
            f"Each rank sends to its {side} neighbour and also receives from its {side} neighbour, who sends the other "
            "way. Send to the right, (rank + 1) % world_size, and receive from the left, (rank - 1) % world_size."
        )
    return None


def no_op(e: Evidence, wrong: Wrong) -> str | None:
    if any(a.error == "TypeError" and "unexpected keyword argument 'op'" in a.error_text for _, a in errors(e)):
        return 'The function takes two arguments: ring_all_reduce(tensor, op="sum").'
    return None


def chunk_size_of_rank_0(e: Evidence, wrong: Wrong) -> str | None:
    found = mismatched(e)
    if not found:
        return None
    case, send, receive = found[0]
    length = e.cases[case].inputs[0].numel()
    if length % e.cases[case].world == 0 or case != wrong.case:
        return None
    return (
        f"Rank {send.rank} sends {send.nbytes} bytes, and rank {receive.rank} makes room for {receive.nbytes} "
        f"({receive.where}): the chunks of {length} elements differ in length. Give each receive a buffer as long as "
        "the chunk that comes, not as the first one."
    )


def fewer_chunks(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    count = len(torch.chunk(case.inputs[0], case.world))
    if any(a.error == "IndexError" for _, a in errors(e)) and count < case.world:
        return (
            f"If you cut by torch.chunk: of {case.inputs[0].numel()} elements it makes {count} chunks, when "
            f"{case.world} are asked for. torch.tensor_split gives always as many as you ask for, and some of them "
            "may be empty."
        )
    return None


def not_in_place(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    answers = e.answers.get(wrong.case, ())
    for rank, answer in enumerate(answers):
        if answer is None or answer.value is None or answer.value.shape != case.expected[rank].shape:
            return None
        if first_difference(answer.value, case.expected[rank], tolerance(case)) is not None:
            return None
    if not answers:
        return None
    return (
        "The tensor that was returned is right, but the one that was passed in is not. Work in place: write the result "
        "into `tensor` (tensor.copy_(...)), as dist.all_reduce does."
    )


def forgets_remainder(e: Evidence, wrong: Wrong) -> str | None:
    case = e.cases[wrong.case]
    whole = case.inputs[0].numel() // case.world * case.world
    if case.inputs[0].numel() == whole or not e.complete(wrong.case):
        return None
    allowed = tolerance(case)[:whole]
    for answer, want in zip(e.answers[wrong.case], case.expected, strict=True):
        if first_difference(answer.after[:whole], want[:whole], allowed) is not None:
            return None
    return (
        f"The first {whole} elements are right, the last {case.inputs[0].numel() - whole} are not: "
        f"{case.inputs[0].numel()} does not divide by {case.world}, and what is left over belongs to no chunk. "
        "torch.tensor_split makes chunks that differ by at most one element and leaves nothing out."
    )


def fails_alone(e: Evidence, wrong: Wrong) -> str | None:
    worlds = right_worlds(e, values_wrong)
    to_itself = any(m.peer == m.rank for m in e.messages.get(wrong.case, ()))
    if wrong.kind == "raised" and not to_itself:
        return None
    if worlds.get(1) is False and all(right for world, right in worlds.items() if world > 1):
        return "One rank has no neighbours: then there is nothing to send, and the tensor is the result already."
    return None


def _plain_sum(case: GroupCase) -> bool:
    """What counts for a verdict on a number of ranks: neither the division nor another dtype is at work."""
    shape = case.inputs[0]
    return case.options.get("op") != "mean" and shape.dtype == torch.float32 and shape.numel() >= case.world


def power_of_two_only(e: Evidence, wrong: Wrong) -> str | None:
    right, bad = right_and_wrong(e, values_wrong, _plain_sum)
    if (right, bad) == ({2, 4}, {3}):
        return (
            "It works for 2 and for 4 ranks and not for 3: something takes for granted that the number is a power of "
            "two."
        )
    return None


def two_ranks_only(e: Evidence, wrong: Wrong) -> str | None:
    right, bad = right_and_wrong(e, values_wrong, _plain_sum)
    if right == {2} and 4 in bad:
        return (
            "It works for 2 ranks only, where right and left neighbour are the same rank and each phase has one step. "
            "With N ranks each phase has N - 1 steps, and in each step another chunk moves on."
        )
    return None


def different_order(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "Each rank has added or divided in its own order, and rounding depends on the order: the models drift "
        "apart. Let one rank finish a chunk (divide it, too), then pass the finished bits on unchanged."
    )


def _even(e: Evidence) -> tuple[int, list[int], int]:
    """The even case with most ranks: its number, bytes sent by rank, bytes of the tensor."""
    number = max(e.numbers(group="even"), key=lambda k: e.cases[k].world)
    case = e.cases[number]
    sent = [sum(m.nbytes for m in e.sent(number, rank)) for rank in range(case.world)]
    return number, sent, case.inputs[0].numel() * case.inputs[0].element_size()


def through_one_rank(e: Evidence, wrong: Wrong) -> str | None:
    if not e.numbers(group="even"):
        return None
    number, sent, total = _even(e)
    n = e.cases[number].world
    if n > 2 and len(set(sent)) > 1 and max(sent) >= (n - 1) * total:
        busy = sent.index(max(sent))
        return (
            f"Everything passes through rank {busy}: it sent {max(sent)} bytes, {n - 1} times the tensor, while others "
            f"sent {min(sent)}. Its link is the bottleneck; in a ring each rank sends 2(N-1)/N of the tensor."
        )
    return None


def sends_whole_tensor(e: Evidence, wrong: Wrong) -> str | None:
    if not e.numbers(group="even"):
        return None
    number, sent, total = _even(e)
    if e.cases[number].world > 2 and min(sent) >= 2 * total:
        return (
            f"Each rank sent {min(sent) / total:.3g} times the tensor. Send one chunk, 1/N of it, in each step: then "
            "it is 2(N-1)/N times, less than 2 for any number of ranks."
        )
    return None


def not_a_ring(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "The result is right, but this is another algorithm. In a ring each rank sends to (rank + 1) % world_size "
        "and receives from (rank - 1) % world_size only."
    )


def one_message_per_element(e: Evidence, wrong: Wrong) -> str | None:
    return "Every message costs a fixed time, whatever its size. Send a chunk as one message: 2(N-1) in all."


MISTAKES = (
    *COMMON_FIRST,
    *known(no_op, buffer_dtype, chunk_size_of_rank_0, fewer_chunks, kinds=KINDS),
    *known(loses_precision, loses_integers, kinds=("values",)),
    *known(wrong_neighbour, kinds=("hangs", "values")),
    *COMMON_HANDLES,
    *COMMON_HANGS,
    *known(only_reduce_scatter, kinds=("values",), detail=True),
    *known(off_by_one_step, fails_alone, kinds=KINDS),
    *known(not_in_place, copy_not_copied_back, forgets_average, averages_twice, averages_sums, kinds=("values",)),
    *known(wrong_divisor, divides_each_step, wrong_mean, forgets_remainder, kinds=("values",)),
    *known(different_order, kinds=("bits",)),
    *known(through_one_rank, kinds=("values", "bits", "peers", "traffic")),
    *known(sends_whole_tensor, kinds=("traffic",)),
    *known(not_a_ring, kinds=("peers",)),
    *known(one_message_per_element, kinds=("small",)),
    *known(makes_new_tensors, kinds=("values",), detail=True),
    *known(replaces_instead_of_adds, wrong_chunk_reduce_scatter, wrong_chunk_all_gather, adds_in_second_phase,
         kinds=("values",), detail=True),
    *known(power_of_two_only, two_ranks_only, kinds=("values", "hangs"), detail=True),
)  # fmt: skip
