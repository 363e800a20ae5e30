"""Mistakes that people make in any exercise with messages, as sentences. Each is (evidence, wrong) -> text or None."""

import re
from collections.abc import Callable

from course_lib.check.findings import errors, never_waited, pairs, touched
from course_lib.check.group import KINDS, Evidence, GroupCase, GroupMistake, Wrong
from course_lib.launch import Message

Says = Callable[[Evidence, Wrong], str | None]


def ready_made(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "That is ready-made, and here it is what you write. Build it from send, recv, isend, irecv and "
        "batch_isend_irecv."
    )


def no_modulo(e: Evidence, wrong: Wrong) -> str | None:
    if any("take the number modulo" in answer.error_text for _, answer in errors(e)):
        return "The ranks stand on a ring: right is (rank + 1) % world_size, left is (rank - 1) % world_size."
    return None


def destroys_group(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "dist.destroy_process_group() ends all talk between the ranks. That is for whoever started them to do, when "
        "all work is done: leave it out of the function."
    )


def last_calls(e: Evidence) -> list[Message]:
    """Of the case that hangs: what each rank that has not finished called last."""
    number, broken = next(iter(e.broken.items()), (None, None))
    if broken is None or not broken.deadlock:
        return []
    last = {}
    for m in e.messages.get(number, ()):
        last[m.rank] = m
    answers = e.answers.get(number) or [None] * e.cases[number].world
    return [m for rank, m in sorted(last.items()) if answers[rank] is None]


def sends_first(e: Evidence, wrong: Wrong) -> str | None:
    calls = last_calls(e)
    if calls and len(calls) == e.cases[wrong.case].world and all("send" in m.op and m.end is None for m in calls):
        return (
            "A send is over only when its receiver has begun to receive, and here all ranks send first. Start the "
            "send with isend, receive, and only then wait for the send; or use batch_isend_irecv."
        )
    return None


def receives_first(e: Evidence, wrong: Wrong) -> str | None:
    calls = last_calls(e)
    sent = {m.rank for m in e.messages.get(wrong.case, ()) if "send" in m.op}
    if calls and len(calls) == e.cases[wrong.case].world and not sent and all("recv" in m.op for m in calls):
        return "All ranks wait for data that nobody has sent yet. Start the send first, with isend, then receive."
    return None


def wrong_tag(e: Evidence, wrong: Wrong) -> str | None:
    if "a message and its receive need the same tag" in wrong.text:
        return "Give isend and irecv the same tag, or none at all: then both have tag 0."
    return None


def ends_do_not_meet(e: Evidence, wrong: Wrong) -> str | None:
    found = re.search(r"rank (\d+) waits for rank (\d+), but rank \2 sends to rank", wrong.text)
    if found and e.cases[wrong.case].world > 2:
        return (
            "Let every rank send to the right, (rank + 1) % world_size, and receive from the left, "
            "(rank - 1) % world_size: then each message has its receiver."
        )
    return None


def _stuck_pair(e: Evidence, wrong: Wrong, waiting: str) -> Message | None:
    """The other end of a call in which somebody waits although its partner has called as well: so a handle is lost."""
    broken = e.broken.get(wrong.case)
    if not broken or not broken.deadlock:
        return None
    for send, receive in pairs(e, wrong.case):
        here, there = (receive, send) if waiting == "recv" else (send, receive)
        link = "from" if waiting == "recv" else "to"
        sits = f"rank {here.rank}: waits in {here.op} {link} rank {here.peer}" in broken.text
        there_too = f"rank {there.rank}: waits in {there.op}" in broken.text and there.end is None
        if send.end is None and receive.end is None and sits and not (there_too and _waits_for(there, broken.text)):
            return there
    return None


def _waits_for(m: Message, text: str) -> bool:
    link = "to" if "send" in m.op else "from"
    return f"rank {m.rank}: waits in {m.op} {link} rank {m.peer}" in text


def wrong_handle(e: Evidence, wrong: Wrong) -> str | None:
    if m := never_waited(e, "irecv") or _stuck_pair(e, wrong, "send"):
        return (
            f"The handle that irecv returned ({m.where}) was never waited for. Only its wait() says that the data has "
            "arrived; the send's handle tells nothing about it."
        )
    return None


def send_not_waited(e: Evidence, wrong: Wrong) -> str | None:
    if m := never_waited(e, "isend") or _stuck_pair(e, wrong, "recv"):
        return (
            f"The handle that isend returned ({m.where}) was never waited for. Keep it and call its wait(): without it "
            "the message may never leave, and its tensor must not be changed."
        )
    return None


def buffer_in_flight(e: Evidence, wrong: Wrong) -> str | None:
    if m := touched(e):
        return (
            f"Rank {m.rank} changed the tensor that it had given to isend ({m.where}) before that send's wait(). The "
            "bytes leave later, so the neighbour may get the new content. Wait first, or use a buffer of its own."
        )
    return None


def read_before_wait(e: Evidence, wrong: Wrong) -> str | None:
    for number in e.numbers(traced=True):
        for rank, answer in enumerate(e.answers[number]):
            found = answer.after if answer.value is None else answer.value
            if found.is_floating_point() and (answer.after.isnan().any() or found.isnan().any()):
                return (
                    f"When one rank began a little later, rank {rank} used what stood in its receive buffer before the "
                    "data came. Use a buffer only after the wait() of its irecv."
                )
    return None


def right_worlds(e: Evidence, bad: Callable[[Evidence, int], bool]) -> dict[int, bool]:
    """Which numbers of ranks are right in all of their cases, of those that were tried."""
    found: dict[int, bool] = {}
    for number in e.answers.keys() | e.broken.keys():
        world = e.cases[number].world
        found[world] = found.get(world, True) and e.complete(number) and not bad(e, number)
    return found


def right_and_wrong(
    e: Evidence, bad: Callable[[Evidence, int], bool], counts: Callable[[GroupCase], bool]
) -> tuple[set[int], set[int]]:
    """The numbers of ranks (2 and more) that are right in all cases that count, and those wrong in all of them."""
    tried: dict[int, set[bool]] = {}
    for number in e.answers.keys() | e.broken.keys():
        case = e.cases[number]
        if case.world > 1 and counts(case):
            tried.setdefault(case.world, set()).add(e.complete(number) and not bad(e, number))
    return {n for n, found in tried.items() if found == {True}}, {n for n, found in tried.items() if found == {False}}


def mismatched(e: Evidence) -> list[tuple[int, Message, Message]]:
    """Sends that meet a receive of another size, in all cases."""
    return [(k, s, r) for k in e.messages for s, r in pairs(e, k) if s.nbytes != r.nbytes]


def buffer_dtype(e: Evidence, wrong: Wrong) -> str | None:
    found = mismatched(e)
    sizes = [(s.nbytes, r.nbytes) for s, r in pairs(e, wrong.case) if s.nbytes or r.nbytes]
    if found and wrong.case == found[0][0] and len({_ratio(*ends) for ends in sizes}) == 1 and _ratio(*sizes[0]):
        case, send, receive = found[0]
        kind = str(e.cases[case].inputs[0].dtype).removeprefix("torch.")
        return (
            f"Rank {send.rank} sends {send.nbytes} bytes and rank {receive.rank} makes room for {receive.nbytes} "
            f"({receive.where}): the buffer is not {kind} as the tensor is. torch.empty_like(...) takes over its dtype."
        )
    return None


def _ratio(sent: int, room: int) -> float | None:
    """sent / room if it is that of two dtypes; chunks that differ by an element are rarely so, and never all alike."""
    return next((k for k in (2, 4, 8, 1 / 2, 1 / 4, 1 / 8) if sent == k * room), None)


def known(*functions: Says, kinds: tuple[str, ...] = (), detail: bool = False) -> list[GroupMistake]:
    """Mistakes named as their functions are."""
    return [GroupMistake(says.__name__, says, kinds, detail) for says in functions]


COMMON_FIRST = (
    known(ready_made, kinds=("ready_made",))
    + known(destroys_group, kinds=("destroyed",))
    + known(no_modulo, kinds=KINDS)
)
COMMON_HANDLES = known(buffer_in_flight, wrong_handle, send_not_waited, read_before_wait)
COMMON_HANGS = known(sends_first, receives_first, wrong_tag, ends_do_not_meet, kinds=("hangs",))
