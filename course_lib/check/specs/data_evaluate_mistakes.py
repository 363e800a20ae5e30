"""What people get wrong in `evaluate`, recognised by the forward passes, the messages and the numbers."""

import math
from collections.abc import Iterator

from course_lib.check.findings import destroyed, ended_badly, errors
from course_lib.check.group import KINDS, Evidence, GroupSpec, Wrong
from course_lib.check.known import destroys_group, known
from course_lib.check.specs.data_evaluate import (
    MEAN,
    WORLD,
    Oracle,
    cases,
    facts,
    oracle,
    passes,
    untouched,
    values,
    work,
)
from course_lib.check.specs.data_evaluate_messages import OF_MESSAGES, calls, messages


def _forwards(e: Evidence) -> Iterator[tuple[int, int, list[int], bool, bool, float]]:
    """(case, rank, samples, training mode, graph, mark of the buffers), as far as ranks came back."""
    for number in e.answers:
        for rank, answer in enumerate(e.answers[number]):
            for forward in answer.facts.get("forwards", ()) if answer else ():
                yield number, rank, *forward


def _near(got: list[float] | None, want: tuple[float, ...], rel: float = 1e-10) -> bool:
    """Both numbers agree."""
    return got is not None and all(
        math.isclose(a, b, rel_tol=rel, abs_tol=1e-13) for a, b in zip(got, want, strict=True)
    )


def _oracle(e: Evidence, number: int, rank: int = 0) -> Oracle:
    return oracle(e.cases[number].options["seed"], len(e.cases[number].inputs[0]), rank)


def returns_nothing(e: Evidence, wrong: Wrong) -> str | None:
    if any(fact["kind"] == "NoneType" for number in e.answers for fact in facts(e, number)):
        return "Return two numbers on every rank: `return accuracy, loss`."
    return None


def swapped(e: Evidence, wrong: Wrong) -> str | None:
    want = tuple(e.cases[wrong.case].expected[0].tolist())
    if any(given and _near(given[::-1], want) for given in _got(e, wrong.case)):
        return "The numbers are right, and the wrong way round: accuracy first, then the loss."
    return None


def not_in_eval_mode(e: Evidence, wrong: Wrong) -> str | None:
    refused = any("more than 1 value per channel when training" in answer.error_text for _, answer in errors(e))
    if refused or any(training for _, _, _, training, _, _ in _forwards(e)):
        return (
            "The model is in training mode: dropout drops, and BatchNorm normalises with the batch in hand and even "
            "changes its statistics. Call model.module.eval() first."
        )
    return None


def wrapper_called(e: Evidence, wrong: Wrong) -> str | None:
    if any(fact["wrapped"] for number in e.answers for fact in facts(e, number)):
        return (
            "DDP's forward may broadcast the buffers, and then waits for all ranks; but ranks can have unequal numbers "
            "of batches, or none. Evaluate model.module, and give the buffers of rank 0 to all yourself, once."
        )
    return None


def buffers_differ(e: Evidence, wrong: Wrong) -> str | None:
    marks = {rank: mark for number, rank, _, _, _, mark in _forwards(e) if number == 0}
    if len(set(marks.values())) > 1:
        return (
            "BatchNorm's statistics differ from rank to rank, so each rank evaluates another model. Give those of rank "
            "0 to all, once, before the first forward: dist.broadcast(buffer, 0) for each of model.module.buffers()."
        )
    return None


def everyone_everything(e: Evidence, wrong: Wrong) -> str | None:
    shares = [
        {n for k, r, numbers, *_ in _forwards(e) if (k, r) == (0, rank) for n in numbers} for rank in range(WORLD)
    ]
    if all(len(share) == len(e.cases[0].inputs[0]) for share in shares):
        return (
            f"Every rank evaluates all the samples, so {WORLD} ranks are no faster than one. Let rank r take every "
            f"{WORLD}rd sample, from the r-th on, and add up counts."
        )
    return None


def pads_counted(e: Evidence, wrong: Wrong) -> str | None:
    seen, samples = _seen(e, wrong.case), len(e.cases[wrong.case].inputs[0])
    counts = {seen.count(n) for n in seen}
    if len(seen) > samples == len(set(seen)) and len(counts) > 1:
        twice = sorted(n for n in set(seen) if seen.count(n) > 1)
        return (
            f"Sample {twice[0]} is counted {seen.count(twice[0])} times: shares were filled up to equal lengths, as "
            "DistributedSampler does. For an exact result ranks must be allowed unequal shares, images[rank::size]."
        )
    return None


def never_calls_module(e: Evidence, wrong: Wrong) -> str | None:
    if _seen(e, wrong.case) or not e.complete(wrong.case):
        return None
    return (
        "No sample went through model.module: call it as a function, scores = model.module(x). (Its hooks, by which a "
        "pass is seen here and by others elsewhere, run only then, not when its layers are called one by one.)"
    )


def drops_tail(e: Evidence, wrong: Wrong) -> str | None:
    seen, samples = _seen(e, wrong.case), len(e.cases[wrong.case].inputs[0])
    if len(seen) == len(set(seen)) < samples:
        lost = sorted(set(range(samples)) - set(seen))
        if len(lost) >= e.cases[wrong.case].options["batch_size"]:
            return (
                f"Sample {lost[0]} is never looked at ({len(lost)} of {samples} are left out). A rank must go through "
                "all batches of its share; is something in the loop left too early, or does only one batch count?"
            )
        return (
            f"Sample {lost[0]} is never looked at ({len(lost)} of {samples} are left out): the shares leave out the "
            "remainder, or the last, smaller batch is dropped."
        )
    return None


def _seen(e: Evidence, case: int) -> list[int]:
    return [n for number, _, numbers, *_ in _forwards(e) if number == case for n in numbers]


def _got(e: Evidence, number: int) -> list[list[float] | None]:
    """By rank: what was returned."""
    return [fact["value"] for fact in facts(e, number)]


def never_summed(e: Evidence, wrong: Wrong) -> str | None:
    alone = [_own(e, wrong.case, rank) for rank in range(WORLD)]
    got = _got(e, wrong.case)
    if len(got) == WORLD and all(own is None or _near(g, own) for g, own in zip(got, alone, strict=True)):
        return (
            "Each rank tells of its own share only, and rank 0's number is then printed as if it were the result. Add "
            "up the counts of all ranks with one all-reduce."
        )
    return None


def _own(e: Evidence, case: int, rank: int) -> tuple[float, float] | None:
    mine = [n for k, r, numbers, *_ in _forwards(e) if (k, r) == (case, rank) for n in numbers]
    return _oracle(e, case).mean(mine) if mine else None


def only_rank_0(e: Evidence, wrong: Wrong) -> str | None:
    got, want = _got(e, 0), tuple(e.cases[0].expected[0].tolist())
    if len(got) == WORLD and _near(got[0], want) and not any(_near(other, want) for other in got[1:]):
        return (
            "Rank 0 is right and the others are not. They decide by it, too, when to stop or what to save: all_reduce "
            "gives the sum to all, reduce and gather give it to one."
        )
    return None


def mean_of_ranks(e: Evidence, wrong: Wrong) -> str | None:
    shares = [own for rank in range(WORLD) if (own := _own(e, 0, rank))]
    if shares and _any_near(e, wrong, [tuple(sum(column) / WORLD for column in zip(*shares, strict=True))]):
        return (
            "This is the mean of the ranks' means, which counts a sample on a rank with few samples for more. Add up "
            "right answers, losses and samples over all ranks, and divide once, at the end."
        )
    return None


def mean_of_batches(e: Evidence, wrong: Wrong) -> str | None:
    by_sample = _oracle(e, 0)
    means = [[by_sample.mean(n) for k, r, n, *_ in _forwards(e) if (k, r) == (0, rank) and n] for rank in range(WORLD)]
    every = [mean for found in means for mean in found]
    if not all(means):
        return None
    flat = tuple(sum(column) / len(every) for column in zip(*every, strict=True))
    ranks = [tuple(sum(column) / len(found) for column in zip(*found, strict=True)) for found in means]
    summed = (math.nan, sum(loss for _, loss in every) / len(e.cases[0].inputs[0]))
    if _any_near(e, wrong, [summed, flat, tuple(sum(column) / WORLD for column in zip(*ranks, strict=True)), *ranks]):
        return (
            "This is a mean of the batches' means, and the last batch is smaller, so its samples count for more. Take "
            'sums: cross_entropy(..., reduction="sum"), the number of right answers, the number of samples.'
        )
    return None


def only_the_last_batch(e: Evidence, wrong: Wrong) -> str | None:
    """Of each rank's batches the last one alone is counted, and divided by the number of all samples."""
    by_sample, samples = _oracle(e, wrong.case), len(e.cases[wrong.case].inputs[0])
    last = {rank: n for number, rank, n, *_ in _forwards(e) if number == wrong.case and n}
    chosen = [n for numbers in last.values() for n in numbers]
    if len(chosen) in (0, samples):
        return None
    accuracy, loss = (len(chosen) / samples * mean for mean in by_sample.mean(chosen))
    want = e.cases[wrong.case].expected[0].tolist()
    for given in (given for given in _got(e, wrong.case) if given):
        for got, guess, right in zip(given, (accuracy, loss), want, strict=True):
            if math.isclose(got, guess, rel_tol=1e-9) and not math.isclose(got, right, rel_tol=1e-9):
                return (
                    "Only the last batch of each rank is in the sum. Numbers are added up from batch to batch by +=; "
                    "with = the next batch takes the place of the one before."
                )
    return None


def _any_near(e: Evidence, wrong: Wrong, formulas: list[tuple[float, ...]]) -> bool:
    """Case 0 is wrong, and some rank has the loss of a formula; or the right loss, and the accuracy of a formula."""
    want = e.cases[0].expected[0].tolist()
    for accuracy, loss in [given for given in _got(e, 0) if given] if wrong.case == 0 else ():
        for guess in formulas:
            fits = [math.isclose(a, b, rel_tol=1e-9) for a, b in zip((accuracy, loss), guess, strict=True)]
            right = [math.isclose(a, b, rel_tol=1e-9) for a, b in zip((accuracy, loss), want, strict=True)]
            if (fits[1] and not right[1]) or (right[1] and fits[0] and not right[0]):
                return True
    return False


def rounded(e: Evidence, wrong: Wrong) -> str | None:
    got, want = _got(e, wrong.case), e.cases[wrong.case].expected[0].tolist()
    for digits in range(1, 13):
        if got and all(given == [round(number, digits) for number in want] for given in got):
            return f"The numbers are right, and rounded to {digits} digits after the point. Return them as they are."
    return None


def float32_sums(e: Evidence, wrong: Wrong) -> str | None:
    got, want = _got(e, wrong.case), tuple(e.cases[wrong.case].expected[0].tolist())
    if got and all(_near(given, want, 1e-3) for given in got):
        return (
            "Nearly right, as when the numbers go through float32 (or less); torch.zeros(3) is of that kind. Its 24 "
            "bits cannot count beyond 16,777,216 and round every sum of losses. Use dtype=torch.float64."
        )
    return None


def not_divided(e: Evidence, wrong: Wrong) -> str | None:
    samples = len(e.cases[wrong.case].inputs[0])
    want = e.cases[wrong.case].expected[0].tolist()
    for given in _got(e, wrong.case):
        ratios = [g / w for g, w in zip(given or (), want, strict=False) if w]
        if any(math.isclose(ratio, samples, rel_tol=1e-9) for ratio in ratios):
            return "That is the sum. The result is the mean over all samples of all ranks: divide by their number."
        if any(math.isclose(ratio, WORLD, rel_tol=1e-9) for ratio in ratios):
            return "A sum over ranks was divided by the samples of one of them, or not at all. Count all samples, too."
    return None


def own_count(e: Evidence, wrong: Wrong) -> str | None:
    total = len(e.cases[0].inputs[0])
    shares = [sum(len(n) for k, r, n, *_ in _forwards(e) if (k, r) == (0, rank)) for rank in range(WORLD)]
    want = e.cases[0].expected[0].tolist()
    got = _got(e, 0)
    divided = [[w * total / share for w in want] for share in shares if share]
    if len(got) == len(divided) == WORLD and all(_near(g, tuple(d)) for g, d in zip(got, divided, strict=True)):
        return (
            "The sums are those of all ranks, and each is divided by the number of samples of its own rank. Sum the "
            "number of samples over the ranks, too; one all-reduce of three numbers does it."
        )
    return None


def buffers_of_another(e: Evidence, wrong: Wrong) -> str | None:
    got = _got(e, wrong.case)
    for rank in range(1, WORLD):
        if got and all(_near(given, _oracle(e, wrong.case, rank).mean()) for given in got):
            return f"All ranks evaluate with the buffers of rank {rank}: broadcast with src=0."
    if got and all(_near(given, _oracle(e, wrong.case, MEAN).mean()) for given in got):
        return (
            "All ranks evaluate with the mean of the ranks' buffers. A checkpoint holds those of rank 0, and DDP gives "
            "these to all at the next forward: broadcast with src=0."
        )
    return None


def percent(e: Evidence, wrong: Wrong) -> str | None:
    want = e.cases[wrong.case].expected[0].tolist()
    if any(given and _near(given, (100 * want[0], want[1])) for given in _got(e, wrong.case)):
        return "The accuracy is in per cent. Return a share of 1: right answers / samples."
    return None


def empty_share(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "values" and wrong.case != 2:
        return None  # something is wrong where all ranks have samples
    divided = any(answer.error == "ZeroDivisionError" for _, answer in errors(e))
    absent = wrong.kind == "raised" and not e.complete(2) and e.complete(0) and e.complete(1)
    if divided or absent or any(math.isnan(n) for given in _got(e, 2) for n in given or ()):
        return (
            "One rank has no samples: nothing to average there, and no batch. It counts 0 right of 0, joins the "
            "all-reduce like the others, and only the sum over all ranks is divided."
        )
    return None


def leaves_early(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "hangs" and e.complete(0) and e.complete(1):
        return (
            "It hangs when one rank has no samples: that rank leaves out a collective, and the others wait for it. "
            "Every rank must make the same calls, whatever its share."
        )
    return None


def one_rank_calls(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind != "hangs":
        return None
    return (
        "The ranks do not make the same collective calls. No collective may stand in a branch that only some ranks "
        "take, nor in a loop over batches, whose number differs from rank to rank."
    )


def unequal_gather(e: Evidence, wrong: Wrong) -> str | None:
    gathers = [m for m in e.messages.get(wrong.case, ()) if "gather" in m.op and not m.where.startswith("data_eval")]
    if len({m.nbytes for m in gathers}) > 1 and not any("object" in m.op for m in gathers):
        return (
            "gather and all_gather need tensors of one size, and ranks have unequal numbers of samples. Send sums "
            "instead: three numbers a rank, whatever its share."
        )
    return None


def whole_share_at_once(e: Evidence, wrong: Wrong) -> str | None:
    if "samples at once" in wrong.text:
        return "That is more than batch_size: a real test set does not fit into memory. Cut the share into batches."
    return None


def one_rank_works(e: Evidence, wrong: Wrong) -> str | None:
    if "ran the model on" in wrong.text and "of the" in wrong.text:
        return (
            f"The others wait meanwhile, so {WORLD} ranks are no faster than one. Share the samples: rank r takes "
            f"every {WORLD}rd, from the r-th on."
        )
    return None


def graph_kept(e: Evidence, wrong: Wrong) -> str | None:
    if "recorded a graph" in wrong.text:
        return (
            "Nobody will call backward: with torch.no_grad(): (or torch.inference_mode()) saves that memory and time."
        )
    return None


def mode_not_restored(e: Evidence, wrong: Wrong) -> str | None:
    if "the model is in evaluation mode afterwards" in wrong.text:
        return (
            "Training goes on after this, without dropout and with frozen statistics, and nothing tells: "
            "call model.module.train() at the end."
        )
    return None


def mode_of_layers_not_restored(e: Evidence, wrong: Wrong) -> str | None:
    if "are in evaluation mode afterwards" in wrong.text:
        return (
            "Each layer has a flag of its own. model.module.train() sets all of them, as eval() did; an assignment to "
            "model.module.training sets one, and the layers go on as in evaluation."
        )
    return None


def gradients_left_off(e: Evidence, wrong: Wrong) -> str | None:
    if "is_grad_enabled" in wrong.text:
        return (
            "The next training step would record no graph, and its backward fails. `with torch.no_grad():` switches "
            "gradients on again at its end, a bare torch.set_grad_enabled(False) does not."
        )
    return None


def left_frozen(e: Evidence, wrong: Wrong) -> str | None:
    if "does not require a gradient afterwards" in wrong.text:
        return (
            "It would not be trained any more. Leave requires_grad as it is: with torch.no_grad(): records no graph "
            "either."
        )
    return None


MISTAKES = (
    *known(destroys_group, kinds=("destroyed",)),
    *known(wrapper_called, kinds=("values", "hangs", "ended", "traffic")),
    *known(unequal_gather, kinds=KINDS),
    *known(not_in_eval_mode, kinds=("values", "raised", "traffic")),
    *known(
        returns_nothing, everyone_everything, never_calls_module, pads_counted, drops_tail, kinds=("values", "traffic")
    ),
    *known(swapped, kinds=("values",)),
    *known(buffers_differ, buffers_of_another, percent, kinds=("values",)),
    *known(empty_share, kinds=("values", "raised")),
    *known(never_summed, only_rank_0, own_count, not_divided, mean_of_ranks, kinds=("values",)),
    *known(only_the_last_batch, mean_of_batches, kinds=("values",)),
    *known(rounded, float32_sums, kinds=("values",)),
    *known(leaves_early, one_rank_calls, kinds=("hangs", "ended")),
    *known(whole_share_at_once, graph_kept, one_rank_works, kinds=("traffic",)),
    *known(*OF_MESSAGES, kinds=("messages",)),
    *known(mode_not_restored, mode_of_layers_not_restored, gradients_left_off, left_frozen, kinds=("input",)),
)


def compare(e: Evidence) -> Wrong | None:
    """None when all is right; else what is wrong, the most telling first."""
    for look in (destroyed, values, ended_badly, passes, work, messages, untouched):
        if wrong := look(e):
            return wrong
    return None


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    lengths = [len(case.inputs[0]) for case in e.cases]
    right = round(e.cases[0].expected[0][0].item() * lengths[0])
    sizes = [sum(len(f[0]) for f in fact["forwards"]) for fact in facts(e, 0)]
    sent = calls(e, 0, 0)
    return [
        f"{right} of {lengths[0]} right, and the loss, as in one process, on every rank (shares of "
        f"{', '.join(map(str, sizes))}); also for {lengths[1]} samples, and for {lengths[2]}, where a rank has none",
        "each sample once, through the bare module in evaluation mode, with the buffers of rank 0, without a graph",
        f"{len(sent)} calls of rank 0, with {sum(m.nbytes for m in sent)} bytes, no more for {lengths[1]} samples than "
        f"for {lengths[2]}",
        "the model is in training mode again, its weights as before",
    ]


SPEC = GroupSpec("08_data", "evaluate", 6, cases, compare, MISTAKES, praise, "evaluation", seconds=40.0)
