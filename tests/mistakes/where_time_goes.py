"""Wrong and right answers to exercise 11. The name of a wrong answer is the verdict that it must get."""

from itertools import pairwise
from statistics import mean

COMPUTE = ("forward", "backward", "optimizer")


def _stub(spans):
    raise NotImplementedError


def _length(pieces):
    total, reached = 0, float("-inf")
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _added(pieces):
    return sum(end - start for start, end in pieces)


def _of(spans, rank, *kinds):
    return [(start, end) for r, kind, start, end in spans if r == rank and kind in kinds]


def _step(spans):
    return max(end for *_, end in spans) - min(start for _, _, start, _ in spans)


def _covered(start, end, pieces):
    """How long the pieces together cover of start..end."""
    return _length([(max(start, a), min(end, b)) for a, b in pieces if min(end, b) > max(start, a)])


# where_time_goes(spans)


def _table(compute=None, exposed=None, data=None, idle=None, scale=lambda spans, rank: 0.001):
    """The solution with some part exchanged, each a function of (spans, rank). Without arguments it is right."""

    def answer(spans):
        found = {}
        for rank in {rank for rank, *_ in spans}:
            computing = _length(_of(spans, rank, *COMPUTE))
            both = _length(_of(spans, rank, "communication", *COMPUTE))
            busy = _length(_of(spans, rank, "data", "communication", *COMPUTE))
            parts = {"compute": computing, "exposed": both - computing, "data": busy - both}
            given = {"compute": compute, "exposed": exposed, "data": data}
            parts |= {name: function(spans, rank) for name, function in given.items() if function}
            parts["idle"] = idle(spans, rank) if idle else _step(spans) - sum(parts.values())
            found[rank] = {part: us * scale(spans, rank) for part, us in parts.items()}
        return found

    return answer


def _newest_end(spans, rank):
    joined = []
    for start, end in sorted(_of(spans, rank, *COMPUTE)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return _added(joined)


def _span_of(pieces):
    return max(end for _, end in pieces) - min(start for start, _ in pieces)


def _pairwise(spans, rank):
    calls, computing = _of(spans, rank, "communication"), _of(spans, rank, *COMPUTE)
    hidden = sum(max(0, min(e, b) - max(s, a)) for s, e in calls for a, b in computing)
    return _added(calls) - hidden


def _whole_calls(keep):
    def exposed(spans, rank):
        computing, calls = _of(spans, rank, *COMPUTE), _of(spans, rank, "communication")
        return _length([(s, e) for s, e in calls if keep(_covered(s, e, computing), e - s)])

    return exposed


def _each_alone(spans, rank):
    computing = _of(spans, rank, *COMPUTE)
    return sum(e - s - _covered(s, e, computing) for s, e in _of(spans, rank, "communication"))


def _without_data(spans, rank):
    compute = _of(spans, rank, "data", *COMPUTE)
    return _length(compute + _of(spans, rank, "communication")) - _length(compute)


def _data_beside_communication(spans, rank):
    compute = _of(spans, rank, *COMPUTE)
    return _length(compute + _of(spans, rank, "data")) - _length(compute)


def _any_rank(spans, rank):
    compute = [(start, end) for _, kind, start, end in spans if kind in COMPUTE]
    return _length(compute + _of(spans, rank, "communication")) - _length(compute)


def _busy(spans, rank):
    return _length(_of(spans, rank, "data", "communication", *COMPUTE))


def _own_step(spans, rank):
    return _span_of(_of(spans, rank, "data", "communication", *COMPUTE))


def _needs_communication(spans):
    kinds = {}
    for rank, kind, start, end in spans:
        kinds.setdefault(rank, {}).setdefault(kind, []).append((start, end))
    assert all(each["communication"] for each in kinds.values())
    return _table()(spans)


def _needs_a_call(spans):
    for rank, *_ in spans:
        min(start for start, _ in _of(spans, rank, "communication"))
    return _table()(spans)


GOES_WRONG = {
    "stub": _stub,
    "nothing": lambda spans: None,
    "sums_compute": _table(compute=lambda spans, rank: _added(_of(spans, rank, *COMPUTE))),
    "end_of_the_newest": _table(compute=_newest_end),
    "first_to_last": _table(compute=lambda spans, rank: _span_of(_of(spans, rank, *COMPUTE))),
    "optimizer_forgotten": _table(compute=lambda spans, rank: _length(_of(spans, rank, "forward", "backward"))),
    "backward_only": _table(compute=lambda spans, rank: _length(_of(spans, rank, "backward"))),
    "all_communication": _table(exposed=lambda spans, rank: _length(_of(spans, rank, "communication"))),
    "sums_communication": _table(exposed=lambda spans, rank: _added(_of(spans, rank, "communication"))),
    "each_collective_alone": _table(exposed=_each_alone),
    "subtracts_totals": _table(
        exposed=lambda spans, rank: max(
            0, _length(_of(spans, rank, "communication")) - _length(_of(spans, rank, *COMPUTE))
        )
    ),
    "pairwise": _table(exposed=_pairwise),
    "all_or_nothing": _table(exposed=_whole_calls(lambda covered, length: covered < length)),
    "touched_is_hidden": _table(exposed=_whole_calls(lambda covered, length: covered == 0)),
    "hidden_part": _table(
        exposed=lambda spans, rank: (
            _length(_of(spans, rank, "communication"))
            + _length(_of(spans, rank, *COMPUTE))
            - _length(_of(spans, rank, "communication", *COMPUTE))
        )
    ),
    "others_hide_it": _table(exposed=_any_rank),
    "data_hide_it": _table(exposed=_without_data, data=_data_beside_communication),
    "hidden_data": _table(data=lambda spans, rank: _length(_of(spans, rank, "data"))),
    "a_moment_counts_twice": _table(data=_data_beside_communication),
    "own_step": _table(idle=lambda spans, rank: _own_step(spans, rank) - _busy(spans, rank)),
    "from_zero": _table(idle=lambda spans, rank: max(end for *_, end in spans) - _busy(spans, rank)),
    "gaps_forgotten": _table(idle=lambda spans, rank: 0),
    "microseconds": _table(scale=lambda spans, rank: 1),
    "seconds": _table(scale=lambda spans, rank: 1e-6),
    "shares": _table(scale=lambda spans, rank: 1 / _step(spans)),
    "per_cent": _table(scale=lambda spans, rank: 100 / _step(spans)),
    "per_cent_of_busy": _table(scale=lambda spans, rank: 1 / _busy(spans, rank)),
    "no_such_part": _needs_communication,
    "nothing_to_compare": _needs_a_call,
}
GOES_UNNAMED = {
    "a list": (lambda spans: list(_table()(spans).values()), "a dict by rank was expected"),
    "texts as ranks": (lambda spans: {str(r): p for r, p in _table()(spans).items()}, "were expected as keys"),
    "no idle": (
        lambda spans: {r: {k: v for k, v in p.items() if k != "idle"} for r, p in _table()(spans).items()},
        "a dict with compute, exposed, data, idle was expected",
    ),
    "texts": (lambda spans: {r: {k: f"{v} ms" for k, v in p.items()} for r, p in _table()(spans).items()}, "a number"),
    "whole": (lambda spans: {r: {k: round(v) for k, v in p.items()} for r, p in _table()(spans).items()}, "ms was"),
    "raises": (lambda spans: spans.step, "the function raised AttributeError"),
}


def _by_moments(spans):
    """Cuts time at each start and end."""
    cuts = sorted({moment for span in spans for moment in span[2:]})
    found = {rank: dict.fromkeys(("compute", "exposed", "data", "idle"), 0.0) for rank, *_ in spans}
    for begin, stop in pairwise(cuts):
        for rank, parts in found.items():
            here = {k for r, k, start, end in spans if r == rank and start <= begin and stop <= end}
            name = "compute" if here & set(COMPUTE) else "exposed" if "communication" in here else ""
            parts[name or ("data" if here else "idle")] += (stop - begin) / 1e3
    return found


def _by_sets(spans):
    """Every microsecond by itself."""
    begin, stop = min(span[2] for span in spans), max(span[3] for span in spans)
    found = {}
    for rank in {span[0] for span in spans}:
        painted = bytearray(stop - begin)
        for level, kinds in enumerate((["data"], ["communication"], COMPUTE), 1):
            for start, end in _of(spans, rank, *kinds):
                painted[start - begin : end - begin] = bytes([level]) * (end - start)
        counts = [painted.count(level) / 1000 for level in range(4)]
        found[rank] = dict(zip(("idle", "data", "exposed", "compute"), counts, strict=True))
    return found


GOES_RIGHT = {"as the solution": _table(), "by moments": _by_moments, "painted": _by_sets}


# thief(spans)


def _starts(spans):
    return {rank: sorted(s for s, _ in _of(spans, rank, "communication")) for rank, *_ in spans}


def _least_waiting(spans):
    starts = _starts(spans)
    last = [max(calls) for calls in zip(*starts.values(), strict=True)]
    return min(starts, key=lambda rank: sum(last) - sum(starts[rank]))


def _more(spans, suspect, table):
    others = [parts for rank, parts in table.items() if rank != suspect]
    return {part: ms - mean(parts[part] for parts in others) for part, ms in table[suspect].items()}


def _worth(lost, exposed, step):
    return lost >= step / 10 and lost >= exposed


def _kind(spans, rank, table, more):
    return max(("compute", "data", "idle"), key=more.get)


def _thief(who=_least_waiting, worth=_worth, kind=_kind, alone=lambda table: None):
    """The solution with some part exchanged. Without arguments it is right."""

    def answer(spans):
        table = _table()(spans)
        if len(table) == 1:
            return alone(table)
        suspect = who(spans)
        more = _more(spans, suspect, table)
        if not worth(-more["exposed"], table[suspect]["exposed"], sum(table[suspect].values())):
            return None
        return suspect, kind(spans, suspect, table, more)

    return answer


def _always(*_):
    return True


def _most(part):
    return lambda spans: max((parts[part], rank) for rank, parts in _table()(spans).items())[1]


def _most_data(spans):
    return max(_starts(spans), key=lambda rank: _added(_of(spans, rank, "data")))


def _once(spans):
    starts = _starts(spans)
    return max(starts, key=lambda rank: starts[rank][0])


def _largest_wait_for(spans):
    """Who was waited for longest in a single collective."""
    starts = _starts(spans)
    calls = [list(zip(call, starts, strict=True)) for call in zip(*starts.values(), strict=True)]
    return max((max(call)[0] - min(call)[0], max(call)[1]) for call in calls)[1]


def _most_waiting(spans):
    starts = _starts(spans)
    return min(starts, key=lambda rank: sum(starts[rank]))


def _place(spans):
    found = _thief()(spans)
    return found and (sorted({rank for rank, *_ in spans}).index(found[0]), found[1])


def _raw_data(spans, rank, table, more):
    """Whoever loads most is a matter of data."""
    loads = {r: _added(_of(spans, r, "data")) for r in table}
    return "data" if loads[rank] == max(loads.values()) else _kind(spans, rank, table, more)


def _form(change):
    def answer(spans):
        found = _thief()(spans)
        return found and change(*found)

    return answer


THIEF_WRONG = {
    "stub": _stub,
    "nobody": lambda spans: None,
    "longest_communication": _thief(who=_most("exposed"), worth=_always),
    "one_collective": _thief(who=_once, worth=_always),
    "most_data": _thief(who=_most_data, worth=_always),
    "most_compute": _thief(who=_most("compute"), worth=_always),
    "place_not_rank": _place,
    "names_communication": _thief(kind=lambda *_: "communication"),
    "part_of_compute": _form(lambda rank, kind: (rank, "backward" if kind == "compute" else kind)),
    "largest_kind": _thief(kind=lambda spans, rank, table, more: max(("compute", "data"), key=table[rank].get)),
    "hidden_data": _thief(kind=_raw_data),
    "idle_forgotten": _thief(kind=lambda spans, rank, table, more: max(("compute", "data"), key=more.get)),
    "blames_the_network_on_a_rank": _thief(worth=lambda lost, exposed, step: lost >= step / 10),
    "always_somebody": _thief(worth=lambda lost, exposed, step: lost >= exposed or exposed < step / 5),
    "too_small_to_matter": _thief(worth=lambda lost, exposed, step: lost >= exposed and lost > step / 1000),
    "blames_itself": _thief(alone=lambda table: (*table, "data")),
    "only_the_rank": _form(lambda rank, kind: rank),
    "rank_and_kind_exchanged": _form(lambda rank, kind: (kind, rank)),
    "alone": _thief(alone=lambda table: mean([])),
}
THIEF_AGAIN = [
    ("longest_communication", _thief(who=_most_waiting, worth=_always)),
    ("one_collective", _thief(who=_largest_wait_for, worth=_always)),
    ("names_communication", _thief(kind=lambda *_: "exposed")),
    ("blames_the_network_on_a_rank", _thief(worth=_always)),
]
THIEF_UNNAMED = {
    "a text": (lambda spans: "rank 2: data", "None was expected"),
    "another kind": (_form(lambda rank, kind: (rank, "slow")), "None was expected"),
    "raises": (lambda spans: spans.step, "the function raised AttributeError"),
}


def _by_moments_in_calls(spans):
    """Waiting as a union, lost as a difference of means over all but one."""
    table, starts = _by_moments(spans), _starts(spans)
    if len(starts) < 2:
        return None
    last = [max(calls) for calls in zip(*starts.values(), strict=True)]
    waiting = {rank: _length(list(zip(calls, last, strict=True))) for rank, calls in starts.items()}
    suspect = sorted(waiting, key=waiting.get)[0]
    rest = [rank for rank in table if rank != suspect]
    lost = sum(table[rank]["exposed"] - table[suspect]["exposed"] for rank in rest) / len(rest)
    if lost < max(table[suspect]["exposed"], _step(spans) / 1e4):
        return None
    kinds = ("idle", "data", "compute")
    return [suspect, max(kinds, key=lambda kind: sum(table[suspect][kind] - table[rank][kind] for rank in rest))]


THIEF_RIGHT = {
    "as the solution": _thief(),
    "waiting as a union": _by_moments_in_calls,
    "least communication": _thief(
        who=lambda spans: min(_starts(spans), key=lambda rank: _length(_of(spans, rank, "communication")))
    ),
}
