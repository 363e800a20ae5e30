"""The learning rate and the end of the run, as pure functions of the step.

A resumed run cannot be off by one.
"""

import math


def rate(step: int, total: int, base: float, warmup: int = 0, final: float = 0.0) -> float:
    """Learning rate of step 1..total: a line up to `base`, then half a cosine down to `final * base`.

    The warm-up is Goyal et al. 2017 (a large batch is unstable in its first epochs), the cosine is Loshchilov
    and Hutter 2017.

    >>> [round(rate(step, total=8, base=1.0, warmup=4), 3) for step in range(1, 9)]
    [0.25, 0.5, 0.75, 1.0, 0.905, 0.655, 0.345, 0.095]
    >>> rate(1, total=1, base=0.3)
    0.3
    """
    if step <= warmup:
        return base * step / warmup
    # The curve starts where the warm-up ends (without one, at the first step) and would reach its end one
    # step after the last, so that no step has a rate of zero.
    start = max(warmup, 1)
    done = (step - start) / (total + 1 - start)
    return base * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


def scaled(lr: float, global_batch: int, reference: int, optimizer: str) -> float:
    """The rate for `global_batch` samples a step, when `lr` is right for `reference` (0: for any).

    sgd: in proportion, since k small steps move as far as one of k times the rate (Goyal et al. 2017, section 2.1).
    adamw: by the square root, since its steps have a length of their own and only their noise shrinks (Malladi et al.
    2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", which scales the betas, too; not done here).

    >>> scaled(0.1, 512, reference=256, optimizer="sgd"), scaled(0.001, 1024, reference=256, optimizer="adamw")
    (0.2, 0.002)
    >>> scaled(0.1, 512, reference=0, optimizer="sgd")
    0.1
    """
    if not reference:
        return lr
    times = global_batch / reference
    return lr * (math.sqrt(times) if optimizer == "adamw" else times)


def due(step: int, every: int, per_epoch: int, total: int) -> bool:
    """Whether what is done every `every` steps (0: never) and at each epoch's end is due after `step`.

    >>> [step for step in range(1, 12) if due(step, every=4, per_epoch=5, total=11)]
    [4, 5, 8, 10, 11]
    """
    return (every > 0 and step % every == 0) or step % per_epoch == 0 or step == total


def why_stop(step: int, stop_after: int | None, requested: str | None) -> str | None:
    """Why the run stops after this step before its end, or None; `requested` is agreed by all ranks.

    >>> why_stop(7, stop_after=None, requested=None) is None
    True
    >>> why_stop(7, stop_after=7, requested=None)
    'run.stop_after=7 was reached'
    >>> why_stop(7, stop_after=9, requested="rank 1 received SIGTERM")
    'rank 1 received SIGTERM'
    """
    if requested:
        return requested
    if stop_after is not None and step >= stop_after:
        return f"run.stop_after={stop_after} was reached"
    return None
