"""What people get wrong in a learning rate. A wrong formula is recognised by its value: nobody hits that by chance."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from course_lib.check.spec import Answer, Case, Mistake


def close(got: float, want: float) -> bool:
    """Equal but for rounding."""
    return math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-15)


@dataclass(frozen=True)
class Rate:
    """The arguments, and the parts of the formula. A mistake exchanges a part."""

    step: int
    total: int
    warmup: int
    base: float
    reference: int
    batch: int
    ranks: int
    optimizer: str
    times: "Callable[[Rate], float]" = lambda r: r.by_rule(r.batch * r.ranks / r.reference)
    rising: "Callable[[Rate], float]" = lambda r: r.peak * r.step / r.warmup
    falling: "Callable[[Rate], float]" = lambda r: (
        r.peak * half_cosine((r.step - max(r.warmup, 1)) / (r.total + 1 - max(r.warmup, 1)))
    )

    @property
    def peak(self) -> float:
        """The highest rate."""
        return self.base * self.times(self)

    def by_rule(self, ratio: float) -> float:
        """The ratio of batches, as the optimizer wants it."""
        return ratio if self.optimizer == "sgd" else math.sqrt(ratio)

    def value(self) -> float:
        """The rate."""
        return self.rising(self) if self.step <= self.warmup else self.falling(self)


def half_cosine(done: float) -> float:
    """From 1 to 0 while `done` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _wrong(name: str, says: str, **parts: Callable[[Rate], float]) -> Mistake:
    def fits(case: Case, answer: Answer) -> bool:
        if answer.error or isinstance(answer.value, bool) or not isinstance(answer.value, int | float):
            return False
        try:
            wrong = replace(Rate(*case.inputs), **parts).value()
        except ZeroDivisionError:
            return False
        return not close(wrong, case.expected) and close(answer.value, wrong)

    return Mistake(name, fits, says)


def _raises(name: str, error: str, says: str) -> Mistake:
    return Mistake(name, lambda case, answer: answer.error == error, says)


def _scaled(name: str, says: str, times: Callable[[Rate], float]) -> Mistake:
    return _wrong(name, says, times=times)


_SCALES = (
    _scaled(
        "linear_for_adam",
        "The linear rule comes from SGD: k small steps move as far as one with k times the rate. Adam divides its step "
        "by the gradients' own size, so its rule is the square root of the ratio (and even that wants tuning).",
        lambda r: r.batch * r.ranks / r.reference,
    ),
    _scaled(
        "sqrt_for_sgd",
        "The square root is Adam's rule. For SGD k small steps move as far as one with k times the rate: take the "
        "ratio itself.",
        lambda r: math.sqrt(r.batch * r.ranks / r.reference),
    ),
    _scaled(
        "scales_by_ranks",
        "base times the number of ranks is right only if `reference` happens to be the batch of one rank. The rate "
        "belongs to the *global batch*: batch * ranks / reference.",
        lambda r: r.by_rule(r.ranks),
    ),
    _scaled(
        "forgets_ranks",
        "`batch` is that of one rank. A step of DDP averages over the samples of all ranks: the global batch is batch "
        "* ranks.",
        lambda r: r.by_rule(r.batch / r.reference),
    ),
    _scaled(
        "no_reference",
        "The rate is multiplied by the number of samples itself. `base` is right for `reference` samples a step: what "
        "counts is how many times as many there are now, batch * ranks / reference.",
        lambda r: r.by_rule(r.batch * r.ranks),
    ),
    _scaled(
        "upside_down",
        "The ratio is upside down: a larger batch gets a *larger* rate. Take batch * ranks / reference.",
        lambda r: r.by_rule(r.reference / (r.batch * r.ranks)),
    ),
    _scaled(
        "whole_division",
        "// throws the remainder away: 1.9 times the reference becomes 1 times. Divide with /.",
        lambda r: r.by_rule(r.batch * r.ranks // r.reference),
    ),
    _scaled(
        "not_scaled",
        "The rate is `base`, whatever the batch. It was right for `reference` samples a step: scale it.",
        lambda r: 1.0,
    ),
)
_WARMUPS = (
    _wrong(
        "warmup_from_zero",
        "The first step has a rate of 0 and so does nothing. Steps are counted from 1: step k of the warm-up has "
        "k / warmup of the peak.",
        rising=lambda r: r.peak * (r.step - 1) / r.warmup,
    ),
    _wrong(
        "warmup_ends_late",
        "The warm-up reaches the peak one step late. At step `warmup` it is there: step / warmup.",
        rising=lambda r: r.peak * r.step / (r.warmup + 1),
    ),
    _wrong(
        "warmup_one_ahead",
        "That is one step ahead: steps are counted from 1 here, so step k has k / warmup of the peak.",
        rising=lambda r: r.peak * (r.step + 1) / r.warmup,
    ),
    _wrong(
        "warmup_to_base",
        "The warm-up rises to `base`, and then the rate jumps to the scaled peak. Let it rise to the peak: it is there "
        "because the peak is high.",
        rising=lambda r: r.base * r.step / r.warmup,
    ),
    _wrong(
        "warmup_from_base",
        "The warm-up starts at `base` here. (Goyal et al. do so.) Asked for is a line from 0: step k has k / warmup of "
        "the peak.",
        rising=lambda r: r.base + (r.peak - r.base) * r.step / r.warmup,
    ),
    _wrong(
        "warmup_shapes_cosine",
        "During warm-up the line is multiplied by the cosine, so the peak is never reached. Up to step `warmup` there "
        "is only the line.",
        rising=lambda r: r.peak * r.step / r.warmup * half_cosine((r.step - 1) / r.total),
    ),
    _wrong(
        "no_warmup",
        "There is no warm-up: the first step takes the full rate. Up to step `warmup` the rate is peak * step / "
        "warmup.",
        rising=lambda r: r.peak,
    ),
    _wrong(
        "cosine_in_warmup",
        "The warm-up is missing: the cosine begins with the first step.",
        rising=lambda r: r.peak * half_cosine((r.step - 1) / r.total),
    ),
)
_COSINES = (
    _wrong(
        "starts_during_warmup",
        "The cosine counts from the first step of the run, so the rate drops when the warm-up ends. It begins where "
        "the warm-up ends: count from `warmup`, over total + 1 - warmup steps.",
        falling=lambda r: r.peak * half_cosine((r.step - 1) / r.total),
    ),
    _wrong(
        "starts_during_warmup_at_0",
        "The cosine counts from the beginning of the run, so the rate drops when the warm-up ends. It begins where "
        "the warm-up ends: count from `warmup`, over total + 1 - warmup steps.",
        falling=lambda r: r.peak * half_cosine(r.step / r.total),
    ),
    _wrong(
        "length_with_warmup",
        "The cosine begins at the right step, but is as long as the whole run, so it does not come to its end. It has "
        "total + 1 - warmup steps.",
        falling=lambda r: r.peak * half_cosine((r.step - r.warmup) / r.total),
    ),
    _wrong(
        "ends_on_zero",
        "The last step has a rate of 0: a step is computed and thrown away. Let the curve reach 0 one step *after* the "
        "last: divide by total + 1 - warmup.",
        falling=lambda r: r.peak * half_cosine((r.step - r.warmup) / max(r.total - r.warmup, 1)),
    ),
    _wrong(
        "holds_the_peak",
        "The step after the warm-up has the peak once more: the curve is a step late. At step `warmup` it is at its "
        "top already.",
        falling=lambda r: r.peak * half_cosine((r.step - r.warmup - 1) / (r.total - r.warmup)),
    ),
    _wrong(
        "whole_cosine",
        "That is a whole period: the rate is at 0 in the middle of the run and rises again. Take half of one, pi * "
        "done.",
        falling=lambda r: r.peak * half_cosine(2 * (r.step - max(r.warmup, 1)) / (r.total + 1 - max(r.warmup, 1))),
    ),
    _wrong(
        "bare_cosine",
        "The cosine itself goes down to -1, and a negative rate climbs. Take 0.5 * (1 + cos(...)).",
        falling=lambda r: r.peak * math.cos(math.pi * (r.step - max(r.warmup, 1)) / (r.total + 1 - max(r.warmup, 1))),
    ),
    _wrong(
        "straight_line",
        "The rate goes down in a straight line; asked for is half a cosine.",
        falling=lambda r: r.peak * (1 - (r.step - max(r.warmup, 1)) / (r.total + 1 - max(r.warmup, 1))),
    ),
    _wrong(
        "no_cosine",
        "After the warm-up the rate stays at its peak. Asked for is half a cosine down.",
        falling=lambda r: r.peak,
    ),
    _wrong(
        "first_step_late",
        "Without a warm-up the first step has the peak: steps are counted from 1, so the curve starts at "
        "max(warmup, 1).",
        falling=lambda r: r.peak * half_cosine((r.step - r.warmup) / (r.total + 1 - r.warmup)),
    ),
)
MISTAKES = (
    *_WARMUPS,  # first: in the warm-up `base` instead of the peak looks like a rate that is not scaled
    *_SCALES,
    *_COSINES,
    _raises(
        "no_warmup_divides",
        "ZeroDivisionError",
        "A run may have no warm-up, be all warm-up, or have one step: look where a divisor becomes 0 then.",
    ),
    Mistake(
        "nothing",
        lambda case, answer: answer.error is None and answer.value is None,
        "The function came to its end without `return`.",
    ),
)
