"""Exercise 08, first part: which samples a rank gets in an epoch. The calls are spread over three real processes."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from course_lib.check.findings import destroyed, ended_badly, errors
from course_lib.check.group import Evidence, GroupCase, Wrong
from course_lib.check.specs.data_shard_orders import placed, related, repeated

PROCESSES = 3
IN = "in "  # before the call, in a note at an exception
LATER = (10, 64, 100, 128, 256, 1000, 1024)  # epochs, and seeds: where only some digits or bits of it are used
GRID = 24  # so many seeds, and so many epochs of each, are compared with one another
FEW = 16  # samples, for that
MIXED = "seed and epoch are made into one number"
OTHER = 5  # number of the call that is made by all processes at the end: the next epoch, world size 1
# What can be wrong, beside `group.KINDS`: the form of what is returned; processes or calls do not agree; samples are
# lost or repeated; the order depends on the world size, is no shuffle, or is that of another seed or epoch.
KINDS = ("form", "agree", "split", "order", "sorted", "fresh")


@dataclass(frozen=True)
class Call:
    """The epoch of a run: everything but the rank."""

    seed: int
    epoch: int
    samples: int
    world_size: int

    def __str__(self) -> str:
        given = f"seed={self.seed}, epoch={self.epoch}, samples={self.samples}"
        return f"shard({given}, rank, world_size={self.world_size})"

    def of(self, rank: int) -> str:
        """The call for one rank."""
        return str(self).replace("rank,", f"rank={rank},")


def cases(rng: random.Random) -> list[GroupCase]:
    """One epoch on many world sizes, its neighbours in seed and epoch, and lengths at the edges. Fresh numbers."""
    # an even seed: so (seed << 8) ^ epoch is that of seed + 1, 256 epochs later
    seed, epoch, many = 2 * rng.randint(50, 5_000), rng.randint(1, 50), 4 * 7 * 3 * rng.randint(1, 2) + 1
    calls = [Call(seed, epoch, many, world) for world in (1, 3, 2, 4, 7)]
    calls += [Call(seed, epoch + 1, many, world) for world in (1, 3)]
    calls += [Call(seed + 1, epoch, many, 1), Call(seed, 0, many, 1), Call(seed + 1, 0, many, 1)]
    calls += [Call(0, 1, many, 1), Call(1, 0, many, 1)]
    few = ((1, 1), (5, 5), (6, 3), (2, 3), (0, 2), (rng.randint(5, 7), 4))
    calls += [Call(seed, epoch, samples, world) for samples, world in few]
    calls += [Call(seed, epoch + later, many, 1) for later in (*LATER, 2)]
    calls += [Call(seed + later, epoch, many, 1) for later in LATER]
    nothing = (torch.empty(0),) * PROCESSES
    options = {"calls": calls, "salt": rng.getrandbits(30)}
    return [GroupCase("shards", f"{PROCESSES} processes", nothing, nothing, options, drive=drive)]


def drive(fn: Callable, _: torch.Tensor, calls: list[Call], salt: int) -> tuple[dict[str, Any], dict]:
    """Call it for the ranks that this process stands for, in an order that no other process has.

    The first call is made by all, and again at the end; then another one, too.
    """
    me = dist.get_rank()
    seed_all(salt + me)  # in a real run, too, nobody knows what state the global generators are in
    with _salted_hashes(fn, salt * me) as hashed, _clock_ahead(me * 1000):
        first = _share(fn, calls[0], 0)
        shares, before = {}, states()
        for number, call in _in_own_order(calls, me):
            shares |= {f"{number} {rank}": _share(fn, call, rank) for rank in _mine(me, number, call)}
        changed = [name for name, state in states().items() if state != before[name]]
        again, other = _share(fn, calls[0], 0), _share(fn, calls[OTHER], 0)
        orders = _orders(fn, me)
    told = {"first": first, "again": again, "other": other, "shares": shares}
    return told | {"changed": changed, "hashed": len(hashed), "orders": orders}, {}


def _mine(me: int, number: int, call: Call) -> range:
    """The ranks of a call for which this process stands."""
    return range((me - number) % PROCESSES, call.world_size, PROCESSES)


def _in_own_order(calls: list[Call], me: int) -> list[tuple[int, Call]]:
    """From the first on, from the last on, from the middle on: who counts calls gets other numbers."""
    numbered = list(enumerate(calls))
    half = len(calls) // 2
    return (numbered, numbered[::-1], numbered[half:] + numbered[:half])[me % PROCESSES]


def _share(fn: Callable, call: Call, rank: int) -> list[int] | str:
    try:
        return indices(fn(call.seed, call.epoch, call.samples, rank, call.world_size))
    except BaseException as error:
        error.add_note(f"{IN}{call.of(rank)}")
        raise


def _orders(fn: Callable, me: int) -> list[tuple[int, int, int]]:
    """Of a third of the grid: seed, epoch, and a number by which the order of FEW samples is known."""
    calls = [Call(seed, epoch, FEW, 1) for seed in range(me, GRID, PROCESSES) for epoch in range(GRID)]
    return [(call.seed, call.epoch, hash(tuple(_share(fn, call, 0)))) for call in calls]


@contextmanager
def _clock_ahead(seconds: int) -> Iterator[None]:
    """Clocks of several machines differ, and ranks are not equally quick; here they would meet in the same second."""
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() + seconds, lambda: now_ns() + seconds * 10**9
    try:
        yield
    finally:
        time.time, time.time_ns = now, now_ns


@contextmanager
def _salted_hashes(fn: Callable, salt: int) -> Iterator[list[str]]:
    """Let hash() of texts differ between processes, as between Pythons started one by one; ours are forked.

    Yields the texts that were hashed.
    """
    texts: list[str] = []

    def salted(thing: object) -> int:
        if "'" not in repr(thing) and '"' not in repr(thing):
            return hash(thing)
        texts.append(repr(thing))
        return hash(thing) ^ salt

    names = getattr(fn, "__globals__", {})
    if "hash" in names:  # the learner's own
        yield texts
        return
    names["hash"] = salted
    try:
        yield texts
    finally:
        del names["hash"]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def states() -> dict[str, str]:
    """The global generators, as texts that can be compared."""
    words = np.random.get_state()
    return {
        "random": str(random.getstate()),
        "numpy.random": f"{words[2:]} {words[1].tobytes().hex()}",
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def indices(given: object) -> list[int] | str:
    """What was returned, as whole numbers; the type's name where it is no such thing."""
    listed = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if not isinstance(listed, Iterable) or isinstance(listed, str | dict):
        return type(given).__name__
    try:
        listed = list(listed)
        for kinds, words in (((bool, np.bool_), "of True and False"), ((float, np.floating), "of floats")):
            if any(isinstance(index, kinds) for index in listed):
                return f"{type(given).__name__}, {words}"
        return [int(index) for index in listed]
    except (TypeError, ValueError):
        return f"{type(given).__name__}, and not of whole numbers"


class Seen:
    """What the processes returned, put together."""

    def __init__(self, e: Evidence) -> None:
        self.facts = [answer.facts for answer in e.answers[0]]
        self.calls: list[Call] = e.cases[0].options["calls"]
        self._shares = {key: share for facts in self.facts for key, share in facts["shares"].items()}

    def shares(self, number: int) -> list[list[int]]:
        """By rank, of call `number`."""
        return [self._shares[f"{number} {rank}"] for rank in range(self.calls[number].world_size)]

    def order(self, number: int) -> list[int]:
        """The shares of call `number`, collected card by card: one of each rank, then the next of each."""
        hands = self.shares(number)
        rounds = range(max(map(len, hands)))
        return [hand[k] for k in rounds for hand in hands if k < len(hand)]

    def of(self, **wanted: int) -> Iterator[int]:
        """The numbers of the calls with these values."""
        for number, call in enumerate(self.calls):
            if all(getattr(call, name) == value for name, value in wanted.items()):
                yield number


def raised(e: Evidence) -> Wrong | None:
    """Which call raised: one process makes many, for several ranks."""
    for _, answer in errors(e):
        message, marked, call = answer.error_text.rpartition(f"\n{IN}")
        if marked:
            at = f"\n  raised at {answer.error_at}" if answer.error_at else ""
            said = f": {message}" if message else ""
            return Wrong("raised", f"{call} raised {answer.error}{said}{at}", 0)
    return None


def talks(e: Evidence) -> Wrong | None:
    """A pure function asks nobody."""
    for m in e.messages.get(0, ()):
        return Wrong("traffic", f"rank {m.rank} calls {m.op} ({m.where}).", 0)
    return None


def well_formed(e: Evidence) -> Wrong | None:
    """Whole numbers, the same from each process and each time."""
    seen = Seen(e)
    for process, facts in enumerate(seen.facts):
        bad = next(
            (given for given in [facts["first"], facts["other"], *facts["shares"].values()] if isinstance(given, str)),
            None,
        )
        if bad:
            return Wrong("form", f"shard returned a value of type {bad}; a list of indices is needed.", 0)
        call = seen.calls[0].of(0)
        if facts["first"] != seen.facts[0]["first"]:
            starts = [str(f["first"][:4])[:-1] for f in (seen.facts[0], facts)]
            text = f"{call} begins {starts[0]} ... in process 0 and {starts[1]} ... in process {process}."
            return Wrong("agree", text, 0)
        if facts["again"] != facts["first"]:
            return Wrong("agree", f"{call} gave another answer when it was called again with the same arguments.", 0)
    for process, facts in enumerate(seen.facts):
        if facts["other"] != seen.facts[0]["other"]:
            starts = [str(f["other"][:4])[:-1] for f in (seen.facts[0], facts)]
            text = f"begins {starts[0]} ... in process 0 and {starts[1]} ... in process {process}, which had made"
            return Wrong("agree", f"{seen.calls[OTHER].of(0)} {text} other calls before.", 0)
    return None


def complete(e: Evidence) -> Wrong | None:
    """Every sample once over all ranks, and sizes that differ by one at most."""
    seen = Seen(e)
    for number, call in enumerate(seen.calls):
        shares = seen.shares(number)
        owners: dict[int, list[int]] = {}
        for rank, share in enumerate(shares):
            for index in share:
                owners.setdefault(index, []).append(rank)
        sizes = f"the {call.world_size} ranks have {', '.join(str(len(share)) for share in shares)} samples"
        if strange := [index for index in owners if not 0 <= index < call.samples]:
            return Wrong("form", f"{call}: there is no sample {strange[0]}; they are 0 to {call.samples - 1}.", 0)
        if twice := [index for index in sorted(owners) if len(owners[index]) > 1]:
            by = " and ".join(f"rank {rank}" for rank in owners[twice[0]][:2])
            text = f"{len(twice)} samples are seen more than once, sample {twice[0]} by {by}; {sizes}"
            return Wrong("split", f"{call}: {text}.", 0)
        if missing := [index for index in range(call.samples) if index not in owners]:
            text = (
                f"{len(missing)} of the samples 0 to {call.samples - 1} are seen by no rank, {missing[0]} is the first"
            )
            return Wrong("split", f"{call}: {text}; {sizes}.", 0)
        if max(map(len, shares)) - min(map(len, shares)) > 1:
            return Wrong("split", f"{call}: {sizes}; these must differ by one at most.", 0)
    return None


def ordered(e: Evidence) -> Wrong | None:
    """One order for all world sizes, shuffled, another one for each seed and epoch."""
    seen = Seen(e)
    main = seen.calls[0]
    alone = seen.order(0)
    for number in [*seen.of(seed=main.seed, epoch=main.epoch, samples=main.samples)][1:]:
        if seen.order(number) != alone:
            at = next(k for k, pair in enumerate(zip(seen.order(number), alone, strict=True)) if pair[0] != pair[1])
            world = seen.calls[number].world_size
            text = (
                f"{seen.calls[number]}: sample {at} of the epoch is {alone[at]} for one rank, and {world} ranks that "
                f"are dealt to in turn have {seen.order(number)[at]} there (rank {at % world})."
            )
            return Wrong("order", text, 0)
    if alone == sorted(alone):
        return Wrong("sorted", f"{main}: the samples are in the order in which they lie there: 0, 1, 2, ...", 0)
    step, often = Counter((b - a) % len(alone) for a, b in pairwise(alone)).most_common(1)[0]
    if often > len(alone) // 2:
        text = f"{main}: {often} of {len(alone)} samples follow the one {step} places before them"
        return Wrong("sorted", f"{text}: {str(alone[:5])[:-1]}, ...", 0)
    alike = seen.of(samples=main.samples, world_size=1)
    orders = [(str(seen.calls[number]), seen.order(number)) for number in alike]
    return repeated(orders) or related(orders) or placed(orders) or _twins(e)


def _twins(e: Evidence) -> Wrong | None:
    """Two calls of the grid have the same order."""
    known: dict[int, Call] = {}
    for seed, epoch, order in (row for answer in e.answers[0] for row in answer.facts["orders"]):
        call = Call(seed, epoch, FEW, 1)
        twin = known.setdefault(order, call)
        if twin is not call:
            mixed = MIXED if call.seed != twin.seed and call.epoch != twin.epoch else ""
            return Wrong("fresh", f"{twin} and {call} give the same order.", 0, mixed)
    return None


def untouched(e: Evidence) -> Wrong | None:
    """The global generators are as they were."""
    for facts in Seen(e).facts:
        if facts["changed"]:
            return Wrong("input", f"shard changed the state of the global generator of {facts['changed'][0]}.", 0)
    return None


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, raised, ended_badly, talks, well_formed, complete, ordered, untouched):
        if wrong := look(e):
            return wrong
    return None
