"""What people get wrong when they look for the thief. In each trace another way to look finds another rank."""

from collections.abc import Callable

from course_lib.check.spec import Answer, Case, Mistake
from course_lib.check.specs.where_time_oracle import COMPUTE, table
from course_lib.check.specs.where_time_traces import Trace

Finds = Callable[[Trace], int]


def _most(part: str) -> Finds:
    return lambda spans: max((parts[part], rank) for rank, parts in table(spans).items())[1]


def _most_data(spans: Trace) -> int:
    """Whether it is hidden or not."""
    sums: dict[int, int] = {}
    for rank, kind, start, end in spans:
        sums[rank] = sums.get(rank, 0) + (end - start) * (kind == "data")
    return max(sums, key=sums.get)


def _last_at_once(spans: Trace) -> int:
    """The rank that comes last to the first collective."""
    firsts: dict[int, int] = {}
    for rank, kind, start, _ in spans:
        if kind == "communication":
            firsts[rank] = min(start, firsts.get(rank, start))
    return max(firsts, key=firsts.get)


def _blamed(answer: Answer) -> int | None:
    value = answer.value
    return value[0] if isinstance(value, tuple | list) and len(value) == 2 and type(value[0]) is int else None


def _kind(answer: Answer) -> object:
    return answer.value[1] if _blamed(answer) is not None else None


def _blames(name: str, find: Finds, says: str) -> Mistake:
    def fits(case: Case, answer: Answer) -> bool:
        rank = _blamed(answer)
        return (
            rank is not None and case.expected is not None and rank != case.expected[0] and rank == find(*case.inputs)
        )

    return Mistake(name, fits, says)


def _kinds(name: str, group: str, kinds: tuple[str, ...], says: str) -> Mistake:
    def fits(case: Case, answer: Answer) -> bool:
        right = case.expected is not None and _blamed(answer) == case.expected[0]
        return right and group in case.group and _kind(answer) in kinds

    return Mistake(name, fits, says)


def _not_guilty(name: str, group: str, says: str) -> Mistake:
    return Mistake(name, lambda case, answer: case.group == group and _blamed(answer) is not None, says)


def _place(case: Case, answer: Answer) -> bool:
    if case.expected is None or _blamed(answer) in (None, case.expected[0]):
        return False
    return sorted({rank for rank, *_ in case.inputs[0]}).index(case.expected[0]) == _blamed(answer)


MISTAKES = (
    _blames(
        "longest_communication",
        _most("exposed"),
        "That rank is in the collectives for the longest time because it *waits* there: it is the first victim. The "
        "thief waits least.",
    ),
    _blames(
        "one_collective",
        _last_at_once,
        "That rank was late once, to the first collective, and never again. Add up the waiting over all collectives.",
    ),
    _blames(
        "most_data",
        _most_data,
        "That rank has the most data spans, but they lie behind its computing and keep nobody waiting. Look first at "
        "who waits least in the collectives, then at why.",
    ),
    _blames(
        "most_compute",
        _most("compute"),
        "That rank computes a little more than the others, and still comes to the collectives before the thief, so "
        "nobody waits for it. Look first at who waits least, then at why.",
    ),
    Mistake(
        "place_not_rank",
        _place,
        "That is the rank's place in a list. Ranks of a trace may begin at any number: give the rank itself.",
    ),
    Mistake(
        "names_communication",
        lambda case, answer: _kind(answer) in ("communication", "exposed"),
        "Communication is what the others do while they wait, never the reason. The kind is what the thief does "
        "longer *before* it comes: compute, data or idle.",
    ),
    _kinds(
        "part_of_compute",
        "",
        COMPUTE,
        "The kind is one of compute, data and idle: forward, backward and optimizer are all compute.",
    ),
    _kinds(
        "largest_kind",
        "data come late",
        ("compute",),
        "The rank is right. Computing is the largest part of its time, as of everybody's: what counts is what it has "
        "*more* of than the others.",
    ),
    _kinds(
        "hidden_data",
        "computes longer",
        ("data",),
        "The rank is right. It loads more data than the others, but behind its computing, so that costs nothing. "
        "Compare what where_time_goes says: data in which nothing else goes on.",
    ),
    _kinds(
        "idle_forgotten",
        "does nothing",
        ("data", "compute"),
        "The rank is right. It neither computes nor loads longer than the others: for a while nothing of it is "
        "recorded. idle is one of the kinds.",
    ),
    _not_guilty(
        "blames_the_network_on_a_rank",
        "the network is the limit",
        "One rank comes later than the others, but even that rank is in exposed communication for longer than the "
        "others lose by waiting: the network is the limit. None is right.",
    ),
    _not_guilty(
        "always_somebody",
        "all are slow alike",
        "All ranks wait for their data equally long, so none waits for another. Slow is not late: None is right.",
    ),
    _not_guilty(
        "too_small_to_matter",
        "a small difference",
        "What the others lose by that rank is less than a tenth of the step. None is right.",
    ),
    _not_guilty("blames_itself", "one rank alone", "One rank alone keeps nobody waiting. None is right."),
    Mistake(
        "nobody",
        lambda case, answer: answer.error is None and answer.value is None and case.expected is not None,
        "Somebody makes the others wait, and the answer is None. (Without `return` it is None, too.) Look at who "
        "waits least: how much longer is the exposed communication of the others?",
    ),
    Mistake(
        "only_the_rank",
        lambda case, answer: case.expected is not None and answer.value == case.expected[0],
        "That is the right rank; the kind is asked for as well: (rank, kind).",
    ),
    Mistake(
        "rank_and_kind_exchanged",
        lambda case, answer: case.expected is not None and answer.value == case.expected[::-1],
        "The rank stands first: (rank, kind).",
    ),
    Mistake(
        "alone",
        lambda case, answer: bool(answer.error) and case.group == "one rank alone",
        "One rank alone has no others to compare with: then the answer is None.",
    ),
)
