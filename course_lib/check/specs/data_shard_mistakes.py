"""What people get wrong in `shard`, recognised by the indices that came back."""

from itertools import chain, pairwise

from course_lib.check.group import KINDS, Evidence, GroupSpec, Wrong
from course_lib.check.known import destroys_group, known
from course_lib.check.specs.data_shard import LATER, MIXED, Seen, cases, compare
from course_lib.check.specs.data_shard_orders import FOLLOWS, KEPT, MIRRORED, NEARBY, SHIFTED, TURNED, relations


def asks_others(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind in ("traffic", "hangs", "raised", "ended") and any(e.messages.values()):
        return (
            "Each rank can work out its part alone, from the five numbers: then nothing waits, and a restarted run "
            "needs no message to know where it was."
        )
    return None


def returns_nothing(e: Evidence, wrong: Wrong) -> str | None:
    if any(facts["first"] == "NoneType" for facts in Seen(e).facts):
        return "The function came to its end without `return`."
    return None


def hash_of_text(e: Evidence, wrong: Wrong) -> str | None:
    if _disagree(e) and any(facts["hashed"] for facts in Seen(e).facts):
        return (
            "Python salts hash() of a text anew in each process that is started, so each rank gets another order, "
            "without an error. Give the numbers themselves to a generator: np.random.default_rng([seed, epoch])."
        )
    return None


def asks_the_group(e: Evidence, wrong: Wrong) -> str | None:
    """For rank 0 of 1 each process has given the part that it would have in the group that it is in."""
    firsts = [facts["first"] for facts in Seen(e).facts]
    if _disagree(e) and sorted(chain(*firsts)) == list(range(_samples(e, 0))):
        return (
            "Each process cuts out its own part, whatever it is asked for: take rank and world_size from the "
            "arguments, and not from dist.get_rank() and dist.get_world_size()."
        )
    return None


def unseeded(e: Evidence, wrong: Wrong) -> str | None:
    if _disagree(e):
        return (
            "The order comes from a generator that is not seeded here, or seeded with what differs between ranks, such "
            "as the time: each shuffles in another way, so some samples are seen twice and some never. Make a "
            "generator from seed and epoch inside the function."
        )
    return None


def _disagree(e: Evidence) -> bool:
    return len({str(facts["first"]) for facts in Seen(e).facts}) > 1


def carries_state(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if any(f["again"] != f["first"] or f["other"] != seen.facts[0]["other"] for f in seen.facts):
        return (
            "Something is remembered from call to call, a generator outside the function perhaps. A run that is "
            "started again in epoch 7 has not made the calls before: the order must follow from the arguments alone."
        )
    return None


def with_replacement(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if any(len(set(share)) < len(share) for share in seen.shares(0)):
        return "Samples are drawn again and again, as dice are thrown. Shuffle instead: a permutation has each once."
    return None


def everyone_everything(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if all(sorted(share) == list(range(seen.calls[1].samples)) for share in seen.shares(1)):
        return (
            "Every rank has all the samples, so N ranks do the same work N times. Rank r takes every N-th of the "
            "order, from the r-th on."
        )
    return None


def pads(e: Evidence, wrong: Wrong) -> str | None:
    found = _uneven(e)
    whole = all(_union(shares) == set(range(_samples(e, number))) for number, shares in found)
    if whole and all(len(share) == _samples(e, n) // len(shares) + 1 for n, shares in found for share in shares):
        return (
            "All ranks get equally many, and to make it so some samples are given twice: that is what torch's "
            "DistributedSampler does. Here sizes may differ by one."
        )
    return None


def drops_tail(e: Evidence, wrong: Wrong) -> str | None:
    found = _uneven(e)
    if all(len(share) == _samples(e, n) // len(shares) for n, shares in found for share in shares):
        return (
            "All ranks get samples // world_size, and the remainder is lost; like drop_last=True. Here the first "
            "ranks get one more."
        )
    return None


def _uneven(e: Evidence) -> list[tuple[int, list[list[int]]]]:
    seen = Seen(e)
    return [(k, seen.shares(k)) for k, call in enumerate(seen.calls) if call.samples % call.world_size]


def _samples(e: Evidence, number: int) -> int:
    return Seen(e).calls[number].samples


def _union(shares: list[list[int]]) -> set[int]:
    return {index for share in shares for index in share}


def seed_with_rank(e: Evidence, wrong: Wrong) -> str | None:
    shares = Seen(e).shares(1)
    sizes = [len(share) for share in shares]
    if sum(sizes) > len(_union(shares)) > max(sizes) and max(sizes) - min(sizes) < 2:
        return (
            "Each rank cuts its part out of another shuffle: is the rank in the seed? All ranks must shuffle alike; "
            "the rank only says which part is its own."
        )
    return None


def same_shard(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    now, later = (next(seen.of(epoch=seen.calls[k].epoch, world_size=3)) for k in (0, 5))
    if [*map(set, seen.shares(now))] == [*map(set, seen.shares(later))]:
        return (
            "Each rank keeps the same samples in all epochs and only shuffles these. Shuffle all of them first, then "
            "deal: so ranks exchange samples from epoch to epoch."
        )
    return None


def blocks(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if all([*chain(*seen.shares(number))] == seen.order(0) for number in range(1, 5)):
        return (
            "The order is cut into blocks: rank 0 has the first part of it. Then a step of N ranks holds other samples "
            "than a step of one process. Deal like cards: sample i of the order goes to rank i % world_size."
        )
    return None


def sorted_hands(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    rises = [a < b for number in range(5) for share in seen.shares(number) for a, b in pairwise(share)]
    if sum(rises) > 0.8 * len(rises):  # of a shuffle half; of a set of small numbers nearly all
        return (
            "Each rank gives its samples back in rising order, or in that of a set: sorted() or set() has undone the "
            "shuffle. Leave them as they were dealt."
        )
    return None


def shuffled_after_the_deal(e: Evidence, wrong: Wrong) -> str | None:
    seen, alone = Seen(e), Seen(e).order(0)
    worlds = [(number, seen.calls[number].world_size) for number in range(1, 5)]
    for order in (alone, alone[::-1]):  # who turns hands round does so for one rank, too
        if all(set(share) == set(order[r::n]) for k, n in worlds for r, share in enumerate(seen.shares(k))):
            return "The deal is right, but each rank then changes the order of its own hand: leave it as it was dealt."
    return None


def wrong_hands(e: Evidence, wrong: Wrong) -> str | None:
    seen, alone = Seen(e), Seen(e).order(0)
    worlds = [(number, seen.calls[number].world_size) for number in range(1, 5)]
    if all(sorted(seen.shares(k)) == sorted(alone[r::n] for r in range(n)) for k, n in worlds):
        return "The hands are right, but ranks have those of others: rank r takes order[r::world_size]."
    return None


def other_ranks_in_a_round(e: Evidence, wrong: Wrong) -> str | None:
    """In each round of the deal each rank gets one of the right samples, and not always its own."""
    seen, alone = Seen(e), Seen(e).order(0)
    rounds = [(seen.order(k), seen.calls[k].world_size) for k in range(1, 5)]
    if all(set(order[at : at + n]) == set(alone[at : at + n]) for order, n in rounds for at in range(0, len(order), n)):
        return (
            "Each round of the deal has the right samples, and ranks take them in another order in some rounds, back "
            "and forth perhaps. Sample i of the order goes to rank i % world_size, in every round."
        )
    return None


def depends_on_world_size(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if any(seen.order(number) != seen.order(0) for number in range(1, 5)):
        return (
            "The order of the epoch depends on the number of ranks. Then nobody can compare 4 ranks with 1, nor "
            "go on with 3 after one was lost. Shuffle by seed and epoch only, then deal in turn."
        )
    return None


def stays_near(e: Evidence, wrong: Wrong) -> str | None:
    if NEARBY in wrong.text:
        return (
            "Samples do not get far from where they lie, as when only blocks of neighbours are shuffled, or a small "
            "buffer. A batch of sorted data is then of one class. Shuffle all samples: a permutation."
        )
    return None


def not_shuffled(e: Evidence, wrong: Wrong) -> str | None:
    alone = Seen(e).order(0)
    what = "Nothing is shuffled" if alone == sorted(alone) else "A good part of the samples stays in its order"
    return (
        f"{what}: a network that sees sorted classes forgets one while it learns the next. Take a permutation of all "
        "samples from a generator that is seeded with seed and epoch."
    )


def ignores_epoch(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if seen.order(0) == seen.order(next(seen.of(epoch=seen.calls[5].epoch))):
        return "All epochs have the same order: that is what a DistributedSampler does without set_epoch."
    return None


def ignores_seed(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if seen.order(0) == seen.order(7):
        return (
            "The seed changes nothing, so two runs meant to differ see the same order. (If you shift it to the left: "
            "a torch.Generator on the CPU takes only the 32 low bits of its seed.)"
        )
    return None


def _later(seen: Seen, seeds: bool = False) -> dict[int, list[int]]:
    """The orders of the same seed, so many epochs later; or of the same epoch, with seeds so much larger."""
    main = seen.calls[0]

    def call(later: int) -> int:
        seed, epoch = (main.seed + later, main.epoch) if seeds else (main.seed, main.epoch + later)
        return next(seen.of(seed=seed, epoch=epoch, samples=main.samples))

    return {later: seen.order(call(later)) for later in LATER}


def epochs_repeat(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    again = next((later for later, order in _later(seen).items() if order == seen.order(0)), None)
    if again:
        return (
            f"{again} epochs later the same order comes again: only a part of the number of the epoch is used. Give "
            "all of it to the generator: np.random.default_rng([seed, epoch])."
        )
    return None


def seeds_repeat(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    again = next((later for later, order in _later(seen, seeds=True).items() if order == seen.order(0)), None)
    if again:
        return (
            f"The seeds {seen.calls[0].seed} and {seen.calls[0].seed + again} give the same order: only a part of the "
            "seed is used. Give all of it to the generator: np.random.default_rng([seed, epoch])."
        )
    return None


def _by_rule(e: Evidence, wrong: Wrong, *words: str) -> bool:
    """So an order follows from another one: by the verdict's words, or from one epoch to the next."""
    now, later = Seen(e).order(0), Seen(e).order(5)
    found = [text for often, text in relations(now, later) if often > len(now) // 2]
    return any(word in text for text in [wrong.text, *found] for word in words)


def only_rotated(e: Evidence, wrong: Wrong) -> str | None:
    if _by_rule(e, wrong, FOLLOWS):
        return (
            "One epoch has the order of another one and only begins at another place of it, so the same samples meet "
            "again and again. Shuffle anew in each epoch."
        )
    return None


def only_turned_round(e: Evidence, wrong: Wrong) -> str | None:
    if _by_rule(e, wrong, TURNED):
        return (
            "One epoch has the order of another one, read backwards, so the same samples meet again. Shuffle anew in "
            "each epoch: np.random.default_rng([seed, epoch])."
        )
    return None


def only_renumbered(e: Evidence, wrong: Wrong) -> str | None:
    """The numbers of one shuffle, each plus the epoch for example; after as many epochs as samples it comes again."""
    if _by_rule(e, wrong, SHIFTED, MIRRORED):
        return (
            "There is one shuffle, and an epoch only changes its numbers by a rule, such as + epoch. Shuffle anew in "
            "each epoch: np.random.default_rng([seed, epoch])."
        )
    return None


def fixed_places(e: Evidence, wrong: Wrong) -> str | None:
    if KEPT in wrong.text:
        return (
            "That sample is left out of the shuffle, or put to its place after it. In a shuffle each sample can come "
            "to each place: take a permutation of all samples, and change nothing in it."
        )
    return None


def seed_plus_epoch(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    zero_one, one_zero = (next(seen.of(seed=seed, epoch=1 - seed)) for seed in (0, 1))
    same = seen.order(5) == seen.order(7) or seen.order(zero_one) == seen.order(one_zero)
    if same or wrong.detail == MIXED or seen.order(7) in _later(seen).values():
        return (
            "The two numbers are made into one, by an addition perhaps, so seed 1 in epoch 0 is seed 0 in epoch 1. "
            "(torch's DistributedSampler adds them: runs with neighbouring seeds are then one run, shifted.) "
            "np.random.default_rng([seed, epoch]) keeps them apart."
        )
    return None


def changes_global_generator(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "input":
        return (
            "Whoever asks which samples come next must not change dropout's next mask. Use a generator of its own: "
            "torch.Generator(), np.random.default_rng(...) or random.Random(...)."
        )
    return None


MISTAKES = (
    *known(destroys_group, kinds=("destroyed",)),
    *known(asks_others, kinds=KINDS),
    *known(returns_nothing, kinds=("form",)),
    *known(hash_of_text, asks_the_group, unseeded, carries_state, kinds=("agree",)),
    *known(with_replacement, everyone_everything, pads, drops_tail, seed_with_rank, kinds=("split",)),
    *known(sorted_hands, same_shard, blocks, shuffled_after_the_deal, wrong_hands, kinds=("order",)),
    *known(other_ranks_in_a_round, depends_on_world_size, kinds=("order",)),
    *known(stays_near, not_shuffled, kinds=("sorted",)),
    *known(ignores_epoch, ignores_seed, only_renumbered, only_rotated, only_turned_round, kinds=("fresh",)),
    *known(epochs_repeat, seeds_repeat, seed_plus_epoch, fixed_places, kinds=("fresh",)),
    *known(changes_global_generator, kinds=("input",)),
)


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    seen = Seen(e)
    worlds = sorted({call.world_size for call in seen.calls})
    lengths = sorted({call.samples for call in seen.calls})
    return [
        f"every sample once an epoch: {', '.join(map(str, lengths))} samples, dealt to up to {worlds[-1]} ranks; sizes "
        "differ by one at most",
        "the same order for 1, 2, 3, 4 and 7 ranks, another one for each epoch and each seed",
        f"the same answer in {len(seen.facts)} processes and on each call; no message, no global generator touched",
    ]


SPEC = GroupSpec("08_data", "shard", 5, cases, compare, MISTAKES, praise, "shards")
