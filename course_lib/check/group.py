"""What an exercise asks of a group of ranks, and what was seen when they worked on it: plain data on both sides.

`together.py` turns cases into evidence by running the learner's function; whoever runs it (today `run`, later a
sandbox) hands back nothing but these records. The judge compares them out here.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from course_lib.collectives.tracked import Event
from course_lib.launch import Message

TALK = {"send", "recv", "isend", "irecv"}  # what learners build on
HANDLE = "handle (Work)"  # the "type" of what isend and irecv return
KINDS = (
    "ready_made", "destroyed", "start", "values", "handles", "bits", "input", "peers", "traffic", "small", "overlap",
    "hangs",  # nobody can go on
    "raised",  # the learner's code raised an exception
    "ended",  # a rank died, or the time was over
)  # fmt: skip


# In the rank: drive(what the learner wrote, input tensor, **options) -> (facts, tensors). A function of this package,
# at the top of its module, that calls the learner's code as a training loop would and notes what came of it.
Drive = Callable[..., tuple[dict[str, Any], dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class GroupCase:
    """One call of the learner's function on each of `world` ranks at the same time."""

    group: str  # what this case tests; all cases of a group share one line of the verdict
    story: str  # the situation, in words: "4 ranks, 960 float32, op='mean'"
    inputs: tuple[torch.Tensor, ...]  # one for each rank
    expected: tuple[torch.Tensor, ...]  # what is right on each rank, in float64 or int64
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments
    traced: bool = False  # record each call with its payload; receive buffers are filled with NaN until data comes
    late: int | None = None  # this rank begins a moment after the others, as a slow one would
    drive: "Drive | None" = None  # how a rank uses what the learner wrote; None: it calls it with its input tensor

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.inputs)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank did in one case."""

    after: torch.Tensor  # the input tensor when the function had returned
    value: torch.Tensor | None = None  # the tensor that it returned, if it was one
    returned: str = "None"  # the type of what it returned
    itself: bool = False  # it returned the input tensor, or one that shares its memory
    open: tuple[int, ...] = ()  # sends and receives, numbered from 0, whose handle it had not waited for at the end
    touched: tuple[int, ...] = ()  # of a traced case: sends whose tensor changed before their wait()
    events: tuple[Event, ...] = ()  # of a traced case
    destroyed: bool = False  # the process group was gone when the function had returned
    facts: dict[str, Any] = field(default_factory=dict)  # of a driven case: what JSON can say of it
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # of a driven case: gradients, weights, ...
    error: str = ""  # the type of the exception that it raised
    error_text: str = ""
    error_at: str = ""  # "Cell In[3], line 5"
    error_in: str = ""  # the function around that line


@dataclass
class Evidence:
    """All that is known of one check. answers[k][r]: rank r in case k; None: it did not come back."""

    cases: list[GroupCase]
    answers: dict[int, list[RankAnswer | None]] = field(default_factory=dict)
    messages: dict[int, list[Message]] = field(default_factory=dict)
    broken: dict[int, "Breakdown"] = field(default_factory=dict)  # the cases in which a run ended badly
    zero: dict[int, float] = field(default_factory=dict)  # the time.monotonic() from which a case's messages count

    def calls(self, case: int, rank: int) -> list[Message]:
        """The sends and receives of a rank in a case, in order."""
        return [m for m in self.messages.get(case, ()) if m.rank == rank and m.op in TALK]

    def sent(self, case: int, rank: int) -> list[Message]:
        """The sends of a rank in a case, in order."""
        return [m for m in self.calls(case, rank) if "send" in m.op]

    def complete(self, case: int) -> bool:
        """All ranks came back without an error."""
        found = self.answers.get(case, [])
        return bool(found) and all(answer is not None and not answer.error for answer in found)

    def numbers(self, **wanted: Any) -> list[int]:
        """The cases that ran to their end and have these values, for example world=4, traced=True."""
        fitting = [k for k, case in enumerate(self.cases) if all(getattr(case, n) == v for n, v in wanted.items())]
        return [k for k in fitting if self.complete(k)]


Kind = TypeVar("Kind", bound=GroupCase)


@dataclass(frozen=True)
class SeenCase(Generic[Kind]):
    """One case of the evidence, by its number."""

    e: Evidence
    number: int

    @property
    def case(self) -> Kind:
        """What was asked."""
        return self.e.cases[self.number]

    @property
    def answers(self) -> list[RankAnswer]:
        """What each rank did."""
        return self.e.answers[self.number]

    @property
    def ranks(self) -> range:
        """Their numbers."""
        return range(self.case.world)


@dataclass(frozen=True)
class Breakdown:
    """How a run ended badly: a hang, an exception, or a death."""

    text: str  # the story, as `run` tells it
    deadlock: bool
    culprit: int | None  # the rank that failed first


@dataclass(frozen=True)
class Wrong:
    """Something is not right. `case` is where it was seen first; `detail` is for when no known mistake fits."""

    kind: str  # see KINDS
    text: str
    case: int
    detail: str = ""


@dataclass(frozen=True)
class GroupMistake:
    """A known wrong answer: `says` looks at the evidence and gives the sentence for the learner when it is this one."""

    name: str
    says: Callable[[Evidence, Wrong], str | None]
    kinds: tuple[str, ...] = ()  # of what is wrong (Wrong.kind); empty: any but "raised", which explains itself
    detail: bool = False  # say `Wrong.detail` too


@dataclass(frozen=True)
class GroupSpec:
    """One exercise for a group of ranks."""

    name: str
    function: str
    points: int
    cases: Callable[[random.Random], list[GroupCase]]  # fresh ones each time; the largest group comes first
    compare: Callable[[Evidence], Wrong | None]  # None when all is right
    mistakes: tuple[GroupMistake, ...]  # the first that fits names it
    praise: Callable[[Evidence], list[str]]  # the lines of the verdict
    pictured: str  # the group whose first case a right answer shows
    seconds: float = 20.0  # for all cases of one start
