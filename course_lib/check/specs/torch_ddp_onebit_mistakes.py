"""The usual mistakes in a comm hook with error feedback: most are rules that give exactly what was found."""

from collections.abc import Callable

from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.torch_ddp_onebit_oracle import close, exact, fits, found, variants

Says = Callable[[Evidence, Wrong], str | None]


def _rule(name: str, text: str, **changed: str) -> Says:
    def says(e: Evidence, wrong: Wrong) -> str | None:
        got = found(e, wrong.case)
        return text if any(fits(e, wrong.case, rule, got) for rule in variants(**changed)) else None

    says.__name__ = name
    return says


def not_compressed(e: Evidence, wrong: Wrong) -> str | None:
    if not close(found(e, wrong.case), exact(e, wrong.case)):
        return None
    return "These are the exact averages of the gradients. What is asked for is the average of one bit an element."


def read_too_early(e: Evidence, wrong: Wrong) -> str | None:
    """Numbers that no gradient gives."""
    got, largest = found(e, wrong.case), max(gradients.abs().max() for gradients in e.cases[wrong.case].inputs)
    size = got.abs()
    odd = got[got.isnan() | (size > 1000 * largest) | ((size > 0) & (size < 1e-30))]
    if len(odd):
        seen = f"A number like {odd[0]:.3g} is what stands by chance in a tensor of torch.empty, "
    elif (got == 0).all(dim=2).any():
        seen = "In some step all averages are 0. Zeros can stand in a tensor of torch.empty, "
    else:
        return None
    return (
        f"{seen}until the data of a collective comes. Is `everyones` taken apart in the hook, before the bytes are "
        "there? That belongs into the function that is given to then(...): it is called when they have come."
    )


def lower_precision(e: Evidence, wrong: Wrong) -> str | None:
    got = found(e, wrong.case)
    if not any(fits(e, wrong.case, rule, got, 1e-6) for rule in variants()):
        return None
    return (
        "Nearly right: the first digits agree, as after a rounding to float32. These gradients are float64: let scale "
        "and buffers have the bucket's dtype."
    )


def waits_in_decode(e: Evidence, wrong: Wrong) -> str | None:
    """All make the same calls, some more of them than others, and go no further."""
    messages = e.messages.get(wrong.case, ())
    ranks = range(e.cases[wrong.case].world)
    calls = [[m.op for m in messages if m.rank == rank] for rank in ranks]
    gathered = [m for m in messages if "gather" in m.op]
    longest = max(calls, key=len)
    if not gathered or any(found != longest[: len(found)] for found in calls):
        return None
    return (
        f"All ranks have called {gathered[-1].op}, and go no further. Does the function that is given to then(...) "
        "wait? It is called when the bytes have come, by the thread that brings the news: a wait() there waits for "
        "itself."
    )


OF_VALUES = (
    not_compressed,
    _rule(
        "no_feedback",
        "What one bit loses is forgotten. Keep wanted - sent in `state`, and add it to the next gradient of the same "
        "parameters: else small gradients beside large ones never arrive.",
        residual="none",
    ),
    _rule(
        "keyed_by_index",
        "After its first backward DDP fills its buckets anew: bucket 0 then has other parameters, or the same in "
        "another order, and gets what was left over of others. Let the key be the parameters: "
        "tuple(bucket.parameters()).",
        residual="index",
    ),
    _rule(
        "residual_overwritten",
        "Several buckets share one residual in `state`, so each bucket gets what another one left over. Keep one for "
        "each: tuple(bucket.parameters()) is a key that no two of them share.",
        residual="single",
    ),
    _rule(
        "keeps_all",
        "All of gradient + residual is kept, also what was sent, so it is sent again and again. Keep the difference: "
        "wanted - sent.",
        keep="wanted",
    ),
    _rule("keeps_sent", "What was sent is kept. Keep what was not: wanted - sent.", keep="sent"),
    _rule(
        "wrong_sign",
        "What is kept has the wrong sign, so errors grow instead of being made good: wanted - sent.",
        keep="negative",
    ),
    _rule(
        "keeps_the_buffer",
        "`state` holds the bucket's buffer itself, into which DDP writes the next gradient, so that is added to "
        "itself. `wanted = bucket.buffer()` is only another name for it: make a new tensor, bucket.buffer() + what was "
        "left.",
        residual="alias",
    ),
    _rule(
        "forgets_old_residual",
        "What is kept is gradient - sent. But what should have been sent is gradient + residual: keep that minus what "
        "was sent, else the old residual is lost after one step.",
        keep="gradient",
    ),
    _rule(
        "residual_of_average",
        "What is kept is the difference to the average of all ranks. Each rank must keep what *it* did not send: its "
        "own wanted - sent.",
        keep="average",
    ),
    _rule(
        "scale_of_gradient",
        "The scale is the mean absolute value of the gradient. What is sent is gradient + residual, so take the mean "
        "of that.",
        scale="gradient",
    ),
    _rule(
        "zero_is_minus",
        "What is exactly 0 is sent as -scale. The rule here is +scale where wanted >= 0.",
        sign="minus",
    ),
    _rule(
        "zero_is_nothing",
        "What is exactly 0 is sent as 0, as torch.sign gives it. One bit knows only + and -: +scale where wanted >= 0.",
        sign="nothing",
    ),
    _rule(
        "kept_elsewhere",
        "`state` was emptied, and what was left over came back all the same: it is kept somewhere else, in a global "
        "dict perhaps, which all models would share. Keep it in `state`: each model has its own, and whoever writes "
        "checkpoints knows where it is.",
        memory="elsewhere",
    ),
    _rule(
        "scale_of_each_parameter",
        "Each parameter has a scale of its own, as in the course's hook `onebit`. Here it is one for the bucket: the "
        "mean of |wanted| over all of it.",
        scale="parameter",
    ),
    _rule(
        "scale_is_max", "The scale is the largest absolute value. Take the mean of the absolute values.", scale="max"
    ),
    _rule(
        "scale_is_rms", "The scale is the root of the mean square. Take the mean of the absolute values.", scale="rms"
    ),
    _rule("scale_is_norm", "The scale is the norm. Take the mean of the absolute values.", scale="norm"),
    _rule(
        "forgets_average",
        "This is the sum over the ranks. With a hook DDP does not divide: do it yourself, by the world size.",
        combine="sum",
    ),
    _rule("averages_twice", "The sum was divided by the world size twice. Divide once.", combine="twice"),
    _rule(
        "majority_vote",
        "These are the signs of the majority. The average of all ranks' (sign * scale) is asked for: where two of "
        "three ranks say plus, a third of the scale is left.",
        combine="vote",
    ),
    _rule(
        "own_scale",
        "Each rank gives the signs of all ranks its own scale. The scale of a rank must travel with its bits.",
        combine="own",
    ),
    _rule("never_exchanges", "Each rank has its own values: nothing was gathered.", combine="local"),
    read_too_early,
    lower_precision,
)


def different_order(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "Each rank adds in its own order, for example itself first, and rounding depends on the order: the models "
        "drift apart. Add rank 0 first, then 1, and so on, on all ranks."
    )


def _per_element(e: Evidence, wrong: Wrong) -> float:
    """Bytes for each element and step that rank 0 sent."""
    from course_lib.check.specs.torch_ddp_onebit import STEPS, sent

    return sent(e, wrong.case, 0) / (STEPS * sum(e.cases[wrong.case].options["lengths"]))


def sends_floats(e: Evidence, wrong: Wrong) -> str | None:
    if _per_element(e, wrong) < 4:
        return None
    return (
        "The numbers are right, but they travel as floats: nothing is saved. Send bits, packed by `pack`, with "
        "all_gather: an all-reduce cannot add bits."
    )


def byte_for_each_sign(e: Evidence, wrong: Wrong) -> str | None:
    if _per_element(e, wrong) >= 4:
        return None
    return "A sign travels as a whole byte or more. `pack` puts eight into one byte."


def returns_no_future(e: Evidence, wrong: Wrong) -> str | None:
    told = next((a.error_text for _, a in errors(e) if a.error == "NotAFuture"), None)
    if told is None:
        return None
    return (
        "DDP goes on with backward and waits for a Future at the end. Give back `work.get_future().then(decode)`: "
        "decode is called when the bytes are there, and what it returns is the averaged gradient."
    )


def future_of_no_tensor(e: Evidence, wrong: Wrong) -> str | None:
    texts = ("Unable to cast", "Expected a proper Tensor")
    if not any(text in answer.error_text for _, answer in errors(e) for text in texts):
        return None
    return (
        "The Future that was returned holds something else than one flat tensor. What it holds is what `decode` "
        "returns: let that be the bucket's averaged gradients, in bucket.buffer() or in a tensor like it."
    )


def waits_in_hook(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "A hook runs inside backward: while it waits, backward does not go on, so nothing overlaps. Start the "
        "all-gather with async_op=True, and return work.get_future().then(decode): decode is called when the bytes are "
        "there."
    )


def loses_a_handle(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "The result is read while it may still be on its way. Take the Future of each collective; several become one "
        "by torch.futures.collect_all([...]). Or put everything into one tensor, as `pack` does."
    )


OF_HANDLES = (loses_a_handle,)
OF_OVERLAP = (waits_in_hook,)
OF_BITS = (different_order,)
OF_TRAFFIC = (sends_floats, byte_for_each_sign)
OF_ERRORS = (returns_no_future, future_of_no_tensor)
OF_HANGS = (waits_in_decode,)
