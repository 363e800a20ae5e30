"""The judge: one specification for each exercise, one engine. `check.NAME(function)` in the last cell of each.

A check that passes returns a Verdict, whose picture is a list of ticks; one that fails raises CheckFailed with
the sentence that names the mistake.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.check.catalogue import GRADED
from course_lib.check.verdict import CheckFailed, Verdict

if TYPE_CHECKING:
    from course_lib.check.engine import judge

__all__ = [
    "CheckFailed",
    "Verdict",
    "judge",
    "messages",
    "ranks",
    "ring_all_reduce",
    "what_it_costs",
    "choose",
    "shard",
    "evaluate",
    "naive_ddp",
    "bucketed_ddp",
    "accumulate",
    "onebit_hook",
    "checkpoints",
    "train",
    "learning_rate",
    "update",
    "where_time_goes",
    "thief",
    "zero_one",
    "bubble",
    "project_plan",
    "project_one",
    "project_ddp",
    "project_speed",
    "project_survival",
    "project_hook",
    "project_report",
]


def __getattr__(name: str):
    if name != "judge":
        raise AttributeError(f"module 'course_lib.check' has no attribute {name!r}")
    return import_module("course_lib.check.engine").judge  # on first use: ranks import parts of this package, too


def _judge(grade_id: str, fn: Callable[..., Any]) -> Verdict:
    """By the specification that the catalogue has for the graded cell, as `course check` does."""
    from course_lib.check.engine import judge

    return judge(GRADED[grade_id].spec(), fn)


def ranks(read_environment: Callable[..., Any]) -> Verdict:
    """Exercise 01: what a rank reads from the environment that torchrun made."""
    return _judge("check_read_environment", read_environment)


def messages(shift: Callable[..., Any]) -> Verdict:
    """Exercise 02: pass a tensor on around a ring, on 1 to 4 real ranks."""
    return _judge("check_shift", shift)


def ring_all_reduce(ring_all_reduce: Callable[..., Any]) -> Verdict:
    """Exercise 03: the ring all-reduce, on 1 to 4 real ranks."""
    return _judge("check_ring_all_reduce", ring_all_reduce)


def what_it_costs(cost: Callable[..., Any]) -> Verdict:
    """Exercise 04, first part: what an all-reduce costs by each of three algorithms."""
    return _judge("check_cost", cost)


def choose(choose: Callable[..., Any]) -> Verdict:
    """Exercise 04, second part: the fastest of them."""
    return _judge("check_choose", choose)


def shard(shard: Callable[..., Any]) -> Verdict:
    """Exercise 08, first part: which samples a rank sees in an epoch."""
    return _judge("check_shard", shard)


def evaluate(evaluate: Callable[..., Any]) -> Verdict:
    """Exercise 08, second part: exact accuracy and loss on three ranks."""
    return _judge("check_evaluate", evaluate)


def accumulate(accumulate: Callable[..., Any]) -> Verdict:
    """Exercise 07, first part: one update from several microbatches, on 2 and 3 real ranks."""
    return _judge("check_accumulate", accumulate)


def onebit_hook(onebit_hook: Callable[..., Any]) -> Verdict:
    """Exercise 07, second part: a comm hook that sends one bit an element, on 2 and 3 real ranks."""
    return _judge("check_onebit_hook", onebit_hook)


def naive_ddp(NaiveDDP: Callable[..., Any]) -> Verdict:
    """Exercise 05: gradients averaged after backward, on 1 to 3 real ranks."""
    return _judge("check_naive_ddp", NaiveDDP)


def bucketed_ddp(BucketedDDP: Callable[..., Any]) -> Verdict:
    """Exercise 06: gradients averaged in buckets, during backward, on 1 to 3 real ranks."""
    return _judge("check_bucketed_ddp", BucketedDDP)


def learning_rate(learning_rate: Callable[..., Any]) -> Verdict:
    """Exercise 09, first part: the learning rate of a step, by optimizer and global batch."""
    return _judge("check_learning_rate", learning_rate)


def update(update: Callable[..., Any]) -> Verdict:
    """Exercise 09, second part: from a loss to weights in the right order, on 2 and 3 real ranks."""
    return _judge("check_update", update)


def checkpoints(Checkpoints: Callable[..., Any]) -> Verdict:
    """Exercise 10, first part: checkpoints that outlive a kill at any moment."""
    return _judge("check_checkpoints", Checkpoints)


def train(train: Callable[..., Any]) -> Verdict:
    """Exercise 10, second part: a loop that is killed and started again, on three real ranks."""
    return _judge("check_train", train)


def where_time_goes(where_time_goes: Callable[..., Any]) -> Verdict:
    """Exercise 11, first part: a trace as milliseconds of each rank by part."""
    return _judge("check_where_time_goes", where_time_goes)


def thief(thief: Callable[..., Any]) -> Verdict:
    """Exercise 11, second part: the rank that makes all wait, and why."""
    return _judge("check_thief", thief)


def zero_one(ZeroOne: Callable[..., Any]) -> Verdict:
    """Exercise 12, first part: an optimizer whose state is cut over the ranks, on 1 to 4 real ranks."""
    return _judge("check_zero_one", ZeroOne)


def bubble(bubble: Callable[..., Any]) -> Verdict:
    """Exercise 12, second part: the part of the time in which a pipeline's stages wait."""
    return _judge("check_bubble", bubble)


def _judge_folder(grade_id: str, fn: Callable[[], Any] | None = None) -> Verdict:
    """The same for a stage of the project, whose files lie in the current folder."""
    from course_lib.check.engine import judge_folder

    return judge_folder(GRADED[grade_id].spec(), Path.cwd(), fn)


def project_plan(plan: Callable[..., Any]) -> Verdict:
    """Exercise 16: the numbers of a run, predicted."""
    return _judge("check_project_plan", plan)


def project_one() -> Verdict:
    """Exercise 16: runs/one, a run of one process."""
    return _judge_folder("check_project_one")


def project_ddp() -> Verdict:
    """Exercise 16: runs/ddp, the same job on several ranks, equal to one process."""
    return _judge_folder("check_project_ddp")


def project_speed(evidence: Callable[[], Any]) -> Verdict:
    """Exercise 16: what the trace of runs/slow shows, and runs/fast, which is faster for it."""
    return _judge_folder("check_project_speed", evidence)


def project_survival() -> Verdict:
    """Exercise 16: runs/killed, killed with -9, continued, and equal to runs/ddp."""
    return _judge_folder("check_project_survival")


def project_hook() -> Verdict:
    """Exercise 16: runs/hook, trained with the learner's own all-reduce."""
    return _judge_folder("check_project_hook")


def project_report(conclusions: Callable[[], Any]) -> Verdict:
    """Exercise 16: report.html about these runs, and what follows from them."""
    return _judge_folder("check_project_report", conclusions)
