"""The judge: one specification for each exercise, one engine. `check.NAME(function)` in the last cell of each.

A check that passes returns a Verdict, whose picture is a list of ticks; one that fails raises CheckFailed with
the sentence that names the mistake.
"""

from collections.abc import Callable
from typing import Any

from course_lib.check.engine import CheckFailed, Verdict, judge

__all__ = ["CheckFailed", "Verdict", "judge", "messages", "ranks", "ring_all_reduce", "what_it_costs", "choose"]


def ranks(read_environment: Callable[..., Any]) -> Verdict:
    """Exercise 01: what a rank reads from the environment that torchrun made."""
    from course_lib.check.specs.ranks import SPEC

    return judge(SPEC, read_environment)


def messages(shift: Callable[..., Any]) -> Verdict:
    """Exercise 02: pass a tensor on around a ring, on 1 to 4 real ranks."""
    from course_lib.check.specs.messages import SPEC

    return judge(SPEC, shift)


def ring_all_reduce(ring_all_reduce: Callable[..., Any]) -> Verdict:
    """Exercise 03: the ring all-reduce, on 1 to 4 real ranks."""
    from course_lib.check.specs.ring_all_reduce import SPEC

    return judge(SPEC, ring_all_reduce)


def what_it_costs(cost: Callable[..., Any]) -> Verdict:
    """Exercise 04, first part: what an all-reduce costs by each of three algorithms."""
    from course_lib.check.specs.what_it_costs import SPEC

    return judge(SPEC, cost)


def choose(choose: Callable[..., Any]) -> Verdict:
    """Exercise 04, second part: the fastest of them."""
    from course_lib.check.specs.what_it_costs import CHOOSE

    return judge(CHOOSE, choose)
