"""Exercise 12: what the ranks of a case did: the first weight that is wrong, and what each rank sent in a step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from course_lib.check.findings import told_apart
from course_lib.check.group import Evidence, SeenCase, Wrong
from course_lib.check.specs.training_oracle import RIGHT
from course_lib.check.specs.zero_one_oracle import Way, ZeroCase
from course_lib.launch import Message

NUMBER = 8  # bytes of a float64
SUMS = ("all_reduce", "all_reduce_coalesced", "broadcast", "reduce")  # through a ring, as one or as both halves
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_gather_coalesced")
SCATTERS = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")


@dataclass(frozen=True)
class Seen(SeenCase[ZeroCase]):
    """One case of the evidence that ran to its end."""

    def got(self, rank: int, step: int) -> torch.Tensor:
        """All weights after a step."""
        return self.answers[rank].tensors["weights"][step]

    def fact(self, name: str, step: int) -> list[int]:
        """Of each rank: "steps" or "given", see `zero_one_drive`."""
        return [answer.facts[name][step] for answer in self.answers]

    def calls(self, rank: int, step: int, *ops: str) -> list[Message]:
        """What a rank called in a step, in order."""
        low, high = self.answers[rank].facts["times"][step]
        zero, found = self.e.zero[self.number], self.e.messages.get(self.number, ())
        mine = (m for m in found if m.rank == rank and low <= m.start + zero < high)
        return [m for m in mine if not ops or m.op in ops]

    def sent(self, rank: int, step: int) -> float:
        """Bytes that a rank sends in a step if each collective goes around a ring, on average over the ranks."""
        return sum(ring_bytes(m, self.case.world) for m in self.calls(rank, step))

    @property
    def fair(self) -> float:
        """Bytes that a rank need send in a step: a reduce-scatter and an all-gather of all weights."""
        return 2 * (1 - 1 / self.case.world) * NUMBER * self.case.numbers

    @property
    def most_sent(self) -> float:
        """`fair`, when each parameter is cut and padded by itself, and a few numbers more."""
        padded = self.case.numbers + self.case.world * self.case.parameters
        return 2 * (1 - 1 / self.case.world) * NUMBER * padded + 4 * NUMBER

    @property
    def most_kept(self) -> int:
        """Numbers of state that a rank may keep, when each parameter is cut and padded by itself."""
        return self.case.kept * (-(-self.case.numbers // self.case.world) + self.case.parameters)


def ring_bytes(m: Message, world: int) -> float:
    """As lesson 03 counts them. What is not a collective over a ring counts as it stands."""
    part = 1 - 1 / world
    if m.op in SUMS:
        return m.nbytes * part * (2 if "all_reduce" in m.op else 1)
    if m.op in SCATTERS:
        return m.nbytes * part
    if m.op in GATHERS:
        return m.nbytes * (world - 1)
    return 0 if "recv" in m.op else m.nbytes


def complete(e: Evidence, **wanted) -> Iterator[Seen]:
    """The cases that ran to their end and have these values."""
    return (Seen(e, number) for number in e.numbers(**wanted))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal but for rounding."""
    return torch.allclose(got, want, **RIGHT)


def is_close(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The same, weight by weight."""
    return torch.isclose(got, want, **RIGHT)


@dataclass(frozen=True)
class Off:
    """The first step whose weights are not right, and the first rank where they are not."""

    seen: Seen
    step: int
    rank: int

    @property
    def text(self) -> str:
        """Where, and what."""
        case = self.seen.case
        got, want = self.seen.got(self.rank, self.step), case.weights[self.step]
        at = int((~is_close(got, want)).nonzero()[0])
        value, right = told_apart(got[at].item(), want[at].item())
        where = f"{case.story}: after step {self.step}, on rank {self.rank}, the weight {case.names[at]}"
        return f"{where} must be {right}, and is {value}."

    def all_are(self, way: Way) -> bool:
        """On all ranks the weights of this step are what this way gives."""
        want = self.seen.case.by(way)[self.step]
        return all(close(self.seen.got(rank, self.step), want) for rank in self.seen.ranks)

    def each_is(self, *wanted: torch.Tensor) -> bool:
        """On all ranks each weight of this step is one of these."""
        return all(
            torch.stack([is_close(self.seen.got(rank, self.step), want) for want in wanted]).any(0).all()
            for rank in self.seen.ranks
        )


def first_off(e: Evidence) -> Off | None:
    """Go through steps as training did: what is wrong first is the cause of what is wrong later."""
    for seen in complete(e):
        for step in seen.case.steps:
            for rank in seen.ranks:
                if not close(seen.got(rank, step), seen.case.weights[step]):
                    return Off(seen, step, rank)
    return None


def values(e: Evidence) -> Wrong | None:
    """Equal to one process with the whole optimizer after every step."""
    off = first_off(e)
    return off and Wrong("values", off.text, off.seen.number)
