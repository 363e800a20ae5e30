"""The usual mistakes in an update: by the order of calls, or by the gradient that the optimizer must have had."""

from collections.abc import Callable

import torch

from course_lib.check.findings import errors
from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.recipe_drive import SCALE
from course_lib.check.specs.recipe_oracle import Found, clipped, found_in, shares

Says = Callable[[Evidence, Wrong], str | None]
ORDER = "backward, synchronize, unscale_, clip, scaler.step, scaler.update"


def first_wrong(e: Evidence, wrong: Wrong) -> Found:
    """The update that `wrong` speaks of."""
    return found_in(e, wrong.case, int(wrong.text.split("Update ")[1][0]))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """But for rounding, and for the 1e-6 in torch's clipping."""
    return bool(((got - want).abs() <= 1e-4 * want.abs().max()).all())


def before(events: list[str], one: str, other: str) -> bool:
    """Whether both were called, and `one` first."""
    return one in events and other in events and events.index(one) < events.index(other)


def _by_events(name: str, text: str, fits: Callable[[list[str], Found], bool]) -> Says:
    def says(e: Evidence, wrong: Wrong) -> str | None:
        found = first_wrong(e, wrong)
        return text.format(order=ORDER) if any(fits(events, found) for events in found.events) else None

    says.__name__ = name
    return says


def _formula(
    name: str,
    text: str,
    formula: Callable[[Found, int], torch.Tensor],
    only: Callable[[list[str]], bool] = lambda events: True,
) -> Says:
    """A mistake by the gradient that it gives to the optimizer of each rank; `only` looks at the calls of rank 0."""

    def says(e: Evidence, wrong: Wrong) -> str | None:
        found = first_wrong(e, wrong)
        if found.overflows or not only(found.events[0]):
            return None
        pairs = [(used, formula(found, rank)) for rank, used in enumerate(found.used)]
        if all(close(*pair) for pair in pairs) and not all(close(want, found.right) for _, want in pairs):
            return text.format(
                norm=found.mean.norm(), scaled=found.mean.norm() * SCALE, step=found.used[0].norm(), max=found.max_norm
            )
        return None

    says.__name__ = name
    return says


def _each_parameter(found: Found) -> torch.Tensor:
    return torch.cat([clipped(part, found.max_norm) for part in found.mean.split(shares())])


OF_VALUES = (
    _by_events(
        "synchronize_before_backward",
        "synchronize() was called before backward: there was nothing to average yet, and later nothing is averaged. "
        "The order is {order}.",
        lambda events, found: before(events, "synchronize", "backward"),
    ),
    _by_events(
        "zeroed_before_step",
        "When the optimizer stepped, there were no gradients: zero_grad() stands between backward and the step. Put it "
        "before backward, or after the step.",
        lambda events, found: "step" in events and not found.overflows and bool((found.used[0] == 0).all()),
    ),
    _by_events(
        "never_steps",
        "Nobody called scaler.step(optimizer), so the weights stay as they are.",
        lambda events, found: found.update == 0 and not {"step", "scaler.step"} & set(events),
    ),
    _by_events(
        "never_zeroes",
        "The infinite gradients of update 1 are still there, and whatever is added to infinity is infinite. Call "
        "zero_grad() in each update, also after one that was skipped.",
        lambda events, found: found.update == 2 and "step" not in events,
    ),
    _by_events(
        "unscales_before_average",
        "scaler.unscale_ is also where the scaler looks for inf and nan. Here each rank looks at its *own* gradients: "
        "one rank skips the step, the others average infinities and step with them. Synchronize first; then all ranks "
        "see the same, and skip together.",
        lambda events, found: found.overflows and before(events, "unscale", "synchronize"),
    ),
    _by_events(
        "decides_alone",
        "Each rank looked at its own gradients before they were averaged, so one rank skips and the others step. "
        "Decide after synchronize(), when all ranks have the same gradients.",
        lambda events, found: found.overflows and len({"step" in of_rank for of_rank in found.events}) > 1,
    ),
    _by_events(
        "steps_with_infinities",
        "optimizer.step() steps whatever the gradients are, and now the weights are nan for ever. Call "
        "scaler.step(optimizer): it steps only if unscale_ found no inf and no nan.",
        lambda events, found: found.overflows and "step" in events and "scaler.step" not in events,
    ),
    _by_events(
        "halves_alone",
        "Only the rank with the overflow has another factor now, and from here on the ranks add up gradients that were "
        "multiplied by different numbers. scaler.update() on all ranks, after all have seen the same gradients, keeps "
        "them equal.",
        lambda events, found: found.overflows and len(set(found.scales)) > 1,
    ),
    _by_events(
        "factor_stays",
        "The factor of the loss must come down after an overflow, else the next step overflows, too: call "
        "scaler.update() after each step, also after one that was skipped.",
        lambda events, found: found.overflows and set(found.scales) == {SCALE},
    ),
    _formula(
        "clips_scaled",
        "The gradients were clipped while they were still {scaled:.0f} long, that is times 65536, and unscaled "
        "afterwards: what is left has a norm of {step:.1g} instead of {max}. Call scaler.unscale_(optimizer) before "
        "clipping.",
        lambda f, rank: clipped(f.mean * SCALE, f.max_norm) / SCALE,
    ),
    _formula(
        "never_unscaled",
        "The optimizer got gradients that still have the scaler's factor in them. scaler.unscale_(optimizer) takes it "
        "out (scaler.step does so, too; optimizer.step does not).",
        lambda f, rank: f.mean * (1.0 if f.update == 0 else 0.5) * SCALE,
    ),
    _formula(
        "clips_and_never_unscales",
        "Every gradient is clipped, also a small one: with the scaler's factor in it its norm is above max_norm. Call "
        "scaler.unscale_(optimizer) before clipping, and scaler.step instead of optimizer.step.",
        lambda f, rank: f.mean * f.max_norm / f.mean.norm(),
        only=lambda events: "unscale" not in events,
    ),
    _formula(
        "loss_not_scaled",
        "The gradients are too small by the scaler's factor: it was divided out, and never multiplied in. Call "
        "scaler.scale(loss).backward().",
        lambda f, rank: f.mean / (SCALE if f.update == 0 else SCALE / 2),
    ),
    _formula(
        "never_averages",
        "Each rank steps with its own gradient: nothing was averaged. Call model.synchronize() after backward.",
        lambda f, rank: clipped(f.local[rank], f.max_norm),
    ),
    _formula(
        "clips_before_average",
        "Each rank clips its own gradient, and then they are averaged. That points elsewhere: a rank with long "
        "gradients counts no more than one with short ones. Clip the average: synchronize first.",
        lambda f, rank: sum(clipped(g, f.max_norm) for g in f.local) / f.world,
    ),
    _formula(
        "no_clip",
        "The gradient of norm {norm:.2g} was not clipped to {max}. Clip when it is averaged and unscaled; before "
        "backward there are no gradients yet.",
        lambda f, rank: f.mean,
    ),
    _formula(
        "clips_each_parameter",
        "Each parameter was clipped by itself, which changes the direction. max_norm is for the norm of all parameters "
        "together: give all of them to one call.",
        lambda f, rank: _each_parameter(f),
    ),
    _formula(
        "clips_values",
        "Each element was cut off at max_norm. clip_grad_value_ does that, and it changes the direction; the norm is "
        "clipped by clip_grad_norm_.",
        lambda f, rank: f.mean.clamp(-f.max_norm, f.max_norm),
    ),
    _formula(
        "always_this_length",
        "A gradient that is shorter than max_norm must stay as it is: clipping shortens, it never makes longer.",
        lambda f, rank: f.mean * f.max_norm / f.mean.norm(),
    ),
)


def leaves_early(e: Evidence, wrong: Wrong) -> str | None:
    broken = e.broken.get(wrong.case)
    if not broken or "all_reduce" not in broken.text:
        return None
    return (
        "A rank that returns before synchronize() leaves the others waiting in it. An overflow on one rank is no "
        "reason to leave: average all the same. The infinity then reaches all ranks, and all skip together."
    )


def _error(name: str, text: str, fits: Callable[[str], bool]) -> Says:
    def says(e: Evidence, wrong: Wrong) -> str | None:
        return text.format(order=ORDER) if any(fits(answer.error_text) for _, answer in errors(e)) else None

    says.__name__ = name
    return says


OF_HANGS = (leaves_early,)
OF_ERRORS = (
    _error(
        "unscales_twice",
        "The gradients were unscaled twice in one update, so divided by the factor twice. scaler.unscale_ stands there "
        "once, before clipping.",
        lambda text: "unscale_() " in text and "in update 0" in text,
    ),
    _error(
        "update_missing",
        "scaler.update() is missing, or stands before scaler.step: it ends an update, and without it the scaler takes "
        "this one for the one before. The order is {order}.",
        lambda text: "since the last update()" in text or "called after step()" in text,
    ),
    _error(
        "updates_twice",
        "scaler.update() was called twice, or before anything was unscaled. It ends an update, once: {order}.",
        lambda text: "No inf checks were recorded" in text,
    ),
)
