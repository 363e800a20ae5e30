"""What a learner says about the trace of runs/slow, against the judge's own reading of the same trace."""

import math
from typing import Any

from course_lib.check.project.files import is_number
from course_lib.check.project.spans import THIEVES, Reading
from course_lib.check.verdict import CheckFailed

KEYS = ("thief", "share", "passes")
APART = 0.05  # how far a share may be from the judge's


def refuse_evidence(told: Any, slow: Reading, fast: Reading) -> None:
    """Raises CheckFailed with the name of the mistake, if there is one."""
    if not isinstance(told, dict) or [key for key in KEYS if key not in told]:
        raise CheckFailed(f"evidence() must return a dict with {', '.join(KEYS)}; it returned {told!r:.80}.", "shape")
    if slow.thief != "data":
        raise CheckFailed(
            "In the traces of runs/slow communication takes longer than data, all waiting left out: the machine was "
            "busy with something else. Train runs/slow again in a new folder when it is not.",
            "busy_trace",
        )
    _refuse_thief(told["thief"], slow)
    _refuse_share(told["share"], slow, fast)
    _refuse_passes(told["passes"], slow)


def _refuse_thief(thief: Any, slow: Reading) -> None:
    if thief == slow.thief:
        return
    shares = ", ".join(f"{name} {slow.share(part):.0%}" for name, part in THIEVES.items())
    says = {
        "communication": (
            "network_blamed",
            "A rank that comes early waits inside of its all-reduce for the other one; that is no work of the network. "
            "without_waiting(spans) leaves it out.",
        ),
        "compute": (
            "work_blamed",
            "What is computed is the work itself. (That it is done in small pieces is the second thief: passes.)",
        ),
        "idle": ("idle_blamed", "Idle is mostly Python between the operators, and what the profiler itself takes."),
    }
    mistake, words = says.get(thief if isinstance(thief, str) else "", ("thief", f"It is one of {', '.join(THIEVES)}."))
    raise CheckFailed(f"thief: {thief!r:.40}, but the step is {shares}. {words}", mistake)


def _refuse_share(share: Any, slow: Reading, fast: Reading) -> None:
    part = THIEVES[slow.thief]
    right = slow.share(part)
    if not is_number(share):
        raise CheckFailed(f"share: a number between 0 and 1 was expected, and not {share!r:.40}.", "shape")
    if abs(share - right) <= APART:
        return
    head = f"share: about {right:.2f} was expected (within {APART}), and not {share:.4g}."
    for mistake, wrong, words in _wrong_shares(part, slow, fast):
        if math.isclose(share, wrong, rel_tol=0.03):
            raise CheckFailed(f"{head} {words}", mistake)
    raise CheckFailed(f"{head} It is {slow.thief} / step, the mean over the ranks.", "share")


def _wrong_shares(part: str, slow: Reading, fast: Reading) -> list[tuple[str, float, str]]:
    right, compute = slow.share(part), slow.share("compute")
    taken = right * slow.milliseconds
    return [
        ("per_cent", 100 * right, "That is in per cent: a part of 1 was asked for."),
        ("milliseconds", taken, "Those are milliseconds: divide by those of the step."),
        ("milliseconds", taken / slow.steps, "Those are milliseconds a step: divide by those of the step."),
        ("steps_mixed", right * slow.steps, f"All {slow.steps} recorded steps are divided by the time of one."),
        ("steps_mixed", right / slow.steps, f"One step is divided by the time of all {slow.steps} recorded ones."),
        ("ranks_added", right * len(slow.ranks), "That is the sum over the ranks, which load at the same time."),
        ("of_compute", right / compute if compute else math.inf, "That is a part of the computing, not of the step."),
        ("compute_share", compute, "That is the share of compute."),
        ("fast_trace", fast.share(part), "That is the share in runs/fast; read the trace of runs/slow."),
    ]


def _refuse_passes(passes: Any, slow: Reading) -> None:
    right, ranks = round(slow.passes), len(slow.ranks)
    if not is_number(passes):
        raise CheckFailed(f"passes: a number was expected, and not {passes!r:.40}.", "shape")
    if abs(passes - slow.passes) <= APART or passes == right:
        return
    wrong = [
        ("passes_of_all_steps", right * slow.steps, f"Those are the forwards of all {slow.steps} recorded steps."),
        ("passes_of_all_ranks", right * ranks, "Those are the forwards of all ranks; count those of one."),
        ("passes_of_all", right * slow.steps * ranks, "Those are the forwards of all ranks in all recorded steps."),
        ("one_pass", 1, "Count the forward spans of a rank, and divide by its recorded steps."),
    ]
    head = f"passes: a rank goes forward {right} times a step in runs/slow, and not {passes:g} times."
    for mistake, value, words in wrong:
        if passes == value:
            raise CheckFailed(f"{head} {words}", mistake)
    raise CheckFailed(head, "passes")
