"""What can be wrong in any exercise for a group of ranks, found in the evidence. Each gives None when all is well."""

from collections.abc import Callable

import torch

from course_lib.check.group import TALK, Evidence, GroupCase, RankAnswer, Wrong
from course_lib.launch import Message

ALLOWED = TALK | {"barrier"}


def ended_badly(e: Evidence) -> Wrong | None:
    """A hang, an exception or a death."""
    for number, broken in e.broken.items():
        case, answers = e.cases[number], e.answers.get(number, [])
        error = next((a for a in answers if a and a.error == "NotImplementedError"), None)
        if error is None and broken.culprit is not None and broken.culprit < len(answers):
            error = answers[broken.culprit]
        if error is not None and error.error:
            at = f"\n  raised at {error.error_at}" if error.error_at else ""
            rank = next(rank for rank, answer in enumerate(answers) if answer is error)
            text = f"rank {rank} raised {error.error}: {error.error_text}{at}"
            return Wrong("raised", f"{case.story}: {text}", number)
        return Wrong("hangs" if broken.deadlock else "ended", f"{case.story}: {broken.text}", number)
    return None


def ready_made(e: Evidence) -> Wrong | None:
    """A collective of torch was called."""
    for number, messages in e.messages.items():
        for m in messages:
            if m.op not in ALLOWED:
                return Wrong("ready_made", f"{e.cases[number].story}: rank {m.rank} calls {m.op} ({m.where}).", number)
    return None


def destroyed(e: Evidence) -> Wrong | None:
    """The process group was destroyed."""
    for number, answers in e.answers.items():
        for rank, answer in enumerate(answers):
            if answer and answer.destroyed:
                text = f"{e.cases[number].story}: rank {rank} destroyed the process group."
                return Wrong("destroyed", text, number)
    return None


def never_waited(e: Evidence, op: str) -> Message | None:
    """A call of isend or irecv whose handle nobody had waited for when the function returned."""
    return _first(e, lambda answer: answer.open, op)


def touched(e: Evidence) -> Message | None:
    """A send whose tensor was changed before its wait()."""
    return _first(e, lambda answer: answer.touched, "send")


def _first(e: Evidence, which: Callable[[RankAnswer], tuple[int, ...]], op: str) -> Message | None:
    for number, answers in e.answers.items():
        for rank, answer in enumerate(answers):
            calls = e.calls(number, rank)
            for call in which(answer) if answer else ():
                if call < len(calls) and op in calls[call].op:
                    return calls[call]
    return None


def handles(e: Evidence) -> Wrong | None:
    """A handle without a wait(), or a tensor touched before it: right values would be luck."""
    for number, answers in e.answers.items():
        for rank, answer in enumerate(answers):
            if answer and (answer.open or answer.touched):
                m = e.calls(number, rank)[(answer.open or answer.touched)[0]]
                link = "to" if "send" in m.op else "from"
                return Wrong("handles", f"{e.cases[number].story}: rank {rank}, {m.op} {link} rank {m.peer}.", number)
    return None


def tolerance(case: GroupCase) -> torch.Tensor:
    """How far rounding may carry a sum of the inputs, element by element: N * eps * sum of |x|.

    Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, section 4.2: (N - 1) * u * sum of |x| to
    first order, in any order of the additions, with u = eps / 2; the mean adds one rounding.
    """
    dtype = case.inputs[0].dtype
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return case.world * eps * sum(tensor.double().abs() for tensor in case.inputs)


def first_difference(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | float) -> int | None:
    """Index of the first element that is further away than allowed (NaN is); None when there is none."""
    if want.dtype == torch.int64:
        bad = got.flatten() != want.flatten()
    else:
        bad = ~((got.double() - want.double()).abs() <= allowed).flatten()
    return int(bad.nonzero()[0]) if bad.any() else None


def told_apart(*values: float) -> list[str]:
    """Values as a learner would print them, with as many digits as it takes to see that they differ."""
    for digits in (6, 9, 12, 17):
        texts = [str(value) if isinstance(value, int) else f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def shape_text(tensor: torch.Tensor) -> str:
    """ "960 float32", or "(3, 5) int64"."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{tensor.numel()} {kind}" if tensor.dim() == 1 else f"{tuple(tensor.shape)} {kind}"


def errors(e: Evidence) -> list[tuple[int, RankAnswer]]:
    """The exceptions, with their cases."""
    return [(k, a) for k, answers in e.answers.items() for a in answers if a is not None and a.error]


def pairs(e: Evidence, number: int) -> list[tuple[Message, Message]]:
    """Each send of a case with the receive that it meets: the k-th from a to b with the k-th on b from a."""
    queues: dict[tuple, list[Message]] = {}
    for m in e.messages.get(number, ()):
        if m.op in TALK and m.peer is not None:
            ends = (m.rank, m.peer, "send") if "send" in m.op else (m.peer, m.rank, "recv")
            queues.setdefault((*ends, m.tag), []).append(m)
    found = []
    for (source, to, kind, tag), sends in queues.items():
        if kind == "send":
            found += zip(sends, queues.get((source, to, "recv", tag), []), strict=False)
    return found
