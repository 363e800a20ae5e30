"""What the ranks of a training case did: calls by step and phase, and the first number that is wrong."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from course_lib.check.findings import told_apart
from course_lib.check.group import Evidence, SeenCase
from course_lib.check.specs.training_models import buffers_of, parameters_of
from course_lib.check.specs.training_oracle import RIGHT, TrainCase, Truth
from course_lib.launch import Message

OURS = "training.py, "  # where a call comes from that no code of the learner made: a barrier of ours, or C++ code
COURSES = "link.py, "  # where the course's own wrappers call from
FORWARD, BACKWARD, SYNCHRONIZE = range(3)  # phases of a step


@dataclass(frozen=True)
class Seen(SeenCase[TrainCase]):
    """One case of the evidence, complete unless said otherwise."""

    @property
    def truth(self) -> Truth:
        return self.case.truth

    @property
    def steps(self) -> range:
        return range(self.case.steps)

    @property
    def nbytes(self) -> int:
        """Of all learnable parameters."""
        return sum(self.truth.nbytes.values())

    @property
    def buffers(self) -> int:
        """Bytes of the buffers."""
        return buffers_of(self.case.options["model"])

    @property
    def parameters(self) -> dict[str, tuple[int, bool]]:
        """All parameters, frozen ones too, in their order: bytes, and whether it is learned."""
        return parameters_of(self.case.options["model"])

    def spread(self, rank: int, steps: Iterable[int]) -> set[str]:
        """What this rank has broadcast in these steps: see `Spread`."""
        return {kind for step, kind in self.answers[rank].facts["spread"] if step in steps}

    def calls(self, rank: int, *ops: str) -> list[Message]:
        """The learner's calls in the whole case, in order; also of a case that broke."""
        return [m for m in self._by_rank[rank] if not ops or m.op in ops]

    @cached_property
    def _by_rank(self) -> dict[int, list[Message]]:
        found: dict[int, list[Message]] = {rank: [] for rank in self.ranks}
        for m in self.e.messages.get(self.number, ()):
            if not _barrier_of_ours(m):
                found[m.rank].append(m)
        return found

    def phase(self, rank: int, step: int, phase: int, *ops: str) -> list[Message]:
        """The calls that began in this phase of a step: FORWARD, BACKWARD or SYNCHRONIZE."""
        low, high = self.answers[rank].facts["times"][step][phase : phase + 2]
        return [m for m in self.calls(rank, *ops) if low <= m.start + self.e.zero[self.number] < high]

    def step(self, rank: int, step: int, *ops: str) -> list[Message]:
        """The calls of a whole step."""
        return [m for phase in (FORWARD, BACKWARD, SYNCHRONIZE) for m in self.phase(rank, step, phase, *ops)]

    def ready(self, rank: int, step: int) -> list[tuple[str, float]]:
        """When backward had each gradient, in the time of the messages, in order."""
        zero = self.e.zero[self.number]
        return [(name, when - zero) for name, when in self.answers[rank].facts["ready"][step]]

    def needed(self, step: int) -> list[str]:
        """The parameters that some rank has used in this step."""
        used = {name for rank in self.ranks for name in self.used(rank, step)}
        return [name for name in self.truth.grad if name in used]

    def used(self, rank: int, step: int) -> list[str]:
        """The parameters that this rank has used in this step."""
        return [name for name, grads in self.truth.local[rank].items() if not bool(grads[step].isnan().any())]

    def in_backward(self, rank: int) -> list[Message]:
        """If this rank, not a patient one, has not come to the end of a backward: the all-reduces of that step.

        Of a case that broke: in each step such a rank meets the others when backward has ended, and at the step's end.
        """
        mine = [m for m in self.e.messages.get(self.number, ()) if m.rank == rank]
        fences = [m for m in mine if _barrier_of_ours(m)]
        if len(fences) % 2 or any(m.end is None for m in fences):
            return []
        return [m for m in self.last_step(rank)[1] if m.op == "all_reduce"]

    def last_step(self, rank: int) -> tuple[int, list[Message]]:
        """The step in which this rank was when its case ended, and its calls there. Also of a case that broke."""
        mine = [m for m in self.e.messages.get(self.number, ()) if m.rank == rank]
        fences = [k for k, m in enumerate(mine) if _barrier_of_ours(m) and m.end is not None]
        return len(fences), [m for m in mine[fences[-1] + 1 if fences else 0 :] if not _barrier_of_ours(m)]

    def value(self, kind: str, rank: int, name: str, step: int) -> torch.Tensor | None:
        """kind: "grad", "held" or "weight"; None for a gradient that is None."""
        if kind == "grad" and name in self.answers[rank].facts["missing"][step]:
            return None
        return self.answers[rank].tensors[f"{kind}/{name}"][step]

    def before(self, rank: int, name: str, step: int) -> torch.Tensor:
        """A parameter at the begin of a step."""
        return self.value("weight", rank, name, step - 1) if step else self.answers[rank].tensors[f"start/{name}"]

    def weights_stay(self, step: int) -> bool:
        """Whether only the optimizer changes the weights in this step."""
        return all(
            torch.equal(self.value("held", rank, name, step), self.before(rank, name, step))
            for rank in self.ranks
            for name in self.truth.grad
        )

    def grads_are(self, step: int, want: Callable[[int, str], torch.Tensor], names: list[str] | None = None) -> bool:
        """Whether in this step each gradient on each rank is want(rank, name); None counts as zero, NaN as None."""
        return all(
            close(_or_zero(self.value("grad", rank, name, step), want(rank, name)), want(rank, name).nan_to_num(0.0))
            for rank in self.ranks
            for name in names or self.truth.grad
        )

    def local(self, step: int, factor: float = 1.0) -> Callable[[int, str], torch.Tensor]:
        """For `grads_are`: what each rank has computed itself. Right as long as the weights are."""
        return lambda rank, name: self.truth.local[rank][name][step] * factor

    def mean(self, step: int, factor: float = 1.0) -> Callable[[int, str], torch.Tensor]:
        """For `grads_are`: what is right, times a factor."""
        return lambda rank, name: self.truth.grad[name][step] * factor

    @cached_property
    def reduced(self) -> int:
        """Bytes of the all-reduces of rank 0 in step 0."""
        return sum(m.nbytes for m in self.step(0, 0, "all_reduce"))


def _barrier_of_ours(m: Message) -> bool:
    return m.op == "barrier" and m.where.startswith(OURS)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal but for rounding."""
    return got.shape == want.shape and torch.allclose(got, want, **RIGHT)


def _or_zero(value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if value is None else value


def complete(e: Evidence, **wanted) -> Iterator[Seen]:
    """The cases that ran to their end and have these values."""
    return (Seen(e, number) for number in e.numbers(**wanted))


@dataclass(frozen=True)
class Off:
    """The first number that is not right."""

    seen: Seen
    step: int
    rank: int
    name: str
    kind: str  # "grad" or "weight"
    got: torch.Tensor | None
    want: torch.Tensor

    @property
    def text(self) -> str:
        """Where, and what."""
        what = "the gradient after synchronize()" if self.kind == "grad" else "the weight after the optimizer's step"
        where = f"{self.seen.case.story}: step {self.step}, rank {self.rank}: {what} of {self.name}"
        if self.got is None:
            return f"{where} is None, and must be the mean over the ranks."
        bad = ~torch.isclose(self.got, self.want, **RIGHT).flatten()
        at = int(bad.nonzero()[0])
        got, want = told_apart(self.got.flatten()[at].item(), self.want.flatten()[at].item())
        return f"{where} must be {want} at element {at}, and is {got}."


def first_off(e: Evidence) -> Off | None:
    """Go through steps as training did: what is wrong first is the cause of what is wrong later."""
    for seen in complete(e):
        if _all_right(seen):
            continue
        for step in seen.steps:
            for kind, right in (("grad", seen.truth.grad), ("weight", seen.truth.weight)):
                for name, values in right.items():
                    for rank in seen.ranks:
                        got, want = seen.value(kind, rank, name, step), values[step]
                        if not close(_or_zero(got, want), want):
                            return Off(seen, step, rank, name, kind, got, want)
    return None


def _all_right(seen: Seen) -> bool:
    """At one look: most cases are right, and comparing number by number takes time."""
    names = list(seen.truth.grad)
    want = torch.cat([kind[name].flatten() for kind in (seen.truth.grad, seen.truth.weight) for name in names])
    return all(
        close(torch.cat([a.tensors[f"{kind}/{name}"].flatten() for kind in ("grad", "weight") for name in names]), want)
        for a in seen.answers
    )
