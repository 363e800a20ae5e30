"""The curves of `course report`, each with a sentence that says what to see."""

import math
from dataclasses import dataclass
from html import escape

from course_lib.show.report_chart import chart
from course_lib.show.report_numbers import ms
from course_lib.show.report_read import Seen, Series, middle
from course_lib.show.report_rows import rows


@dataclass(frozen=True)
class Curve:
    """A chart: a title, the axis with its unit, the lines, and what to see."""

    title: str
    y: str
    lines: dict[str, Series]
    see: str
    log: bool = False
    zero: bool = True


def curves(seen: Seen) -> list[Curve]:
    """All for which something was logged."""
    makers = (_loss, _accuracy, _rate, _norm, _speed, _times, _overlap, _ranks, _memory, _mfu, _scale)
    made = [maker(seen) for maker in makers]
    return [curve for curve in made if any(curve.lines.values())]


def figure(curve: Curve, marks: list[int], last: int) -> str:
    """The chart as HTML with its words; a resume is dotted, the axis goes to the step `last`."""
    lines = {name: points for name, points in curve.lines.items() if points}
    picture = chart(lines, curve.y, marks, curve.log, curve.zero, last)
    return (
        f"<figure><h3>{escape(curve.title)}</h3>{picture}<figcaption>{escape(curve.see)} {dotted(marks)}</figcaption>"
        "</figure>"
    )


def dotted(marks: list[int]) -> str:
    """What the dotted lines say; empty when there are none."""
    if not marks:
        return ""
    shown = ", ".join(map(str, marks[:6])) + (f" and {len(marks) - 6} more" if len(marks) > 6 else "")
    return f"Dotted: a launch went on after step {shown}."


def _ends(points: Series, form: str = "{:.4g}", unit: str = "") -> str:
    return f"from {form.format(points[0][1])} to {form.format(points[-1][1])}{unit}" if points else ""


def _loss(seen: Seen) -> Curve:
    train, test = seen.series("loss"), seen.series("eval_loss", "eval")
    broken = [step for step, value in train if not math.isfinite(value)]
    see = f"The training loss goes {_ends(train)}; it should fall, fast at first."
    if test:
        see += (
            f" The evaluation loss ends at {test[-1][1]:.4g}; when it rises while the other falls, the network learns "
        )
        see += "its samples by heart."
    if broken:
        see += f" From step {broken[0]} on it is not a finite number."
    return Curve("Loss", "loss (nats)", {"training": train, "evaluation": test}, see, log=True, zero=False)


def _accuracy(seen: Seen) -> Curve:
    points = seen.series("accuracy", "eval")
    best = max(points, key=lambda point: point[1], default=(0, 0.0))
    see = f"The best of {len(points)} evaluations is {best[1]:.4f}, after step {best[0]}."
    return Curve("Test accuracy", "part of the test samples", {"accuracy": points}, see)


def _rate(seen: Seen) -> Curve:
    points = seen.series("lr")
    top = max(points, key=lambda point: point[1], default=(0, 0.0))
    see = f"The peak is {top[1]:.4g} at step {top[0]}; warm-up before it, decay after it, no jump at a resume."
    return Curve("Learning rate", "learning rate", {"rate": points}, see)


def _norm(seen: Seen) -> Curve:
    points = seen.series("grad_norm")
    value = middle([value for _, value in points])
    top = max(points, key=lambda point: point[1], default=(0, 0.0))
    see = (
        f"The median is {value or 0:.3g}, the largest {top[1]:.3g} at step {top[0]}; single peaks are common, a climb "
    )
    see += "comes before a loss that is no number."
    return Curve(
        "Gradient norm", "norm over all parameters, before clipping", {"norm": points}, see, log=True, zero=False
    )


def _speed(seen: Seen) -> Curve:
    points = seen.series("samples_per_s")
    see = (
        f"All ranks together, the median is {seen.middle('samples_per_s') or 0:,.0f} samples/s; evaluation and saving "
    )
    see += "are not in it. Dips are a busy machine, slow data or a slow rank."
    return Curve("Speed", "samples/s, all ranks", {"speed": points}, see)


def _times(seen: Seen) -> Curve:
    known = rows(seen)
    data = [(row.step, row.data / row.seconds * 100) for row in known if row.data is not None]
    comm = [(row.step, row.exposed / row.seconds * 100) for row in known if row.exposed is not None]
    see = f"The medians are {middle([v for _, v in data]) or 0:.1f} % for data"
    if comm:
        see += f" and {middle([v for _, v in comm]) or 0:.1f} % for all-reduces that backward could not hide, waiting "
        see += "for the slowest rank included"
    lines = {"waiting for data": data, "communication": comm}
    return Curve("What was not computing", "% of the time of a step", lines, f"{see}.")


def _overlap(seen: Seen) -> Curve:
    points = [(step, value * 100) for step, value in seen.series("overlap")]
    see = f"The median is {middle([v for _, v in points]) or 0:.0f} %: so much of rank 0's communication went on while "
    see += (
        "backward still computed. Known of the steps in which DDP read its clocks: its first ten, then each hundredth."
    )
    return Curve("Overlap", "% of communication behind backward", {"overlap": points}, see)


def _ranks(seen: Seen) -> Curve:
    own = [(step, value * 1000) for step, value in seen.series("slowest_s")]
    others = [(step, value * 1000) for step, value in seen.series("others_s")]
    see = f"A rank's time before it waits for anybody: medians {ms(seen.middle('slowest_s') or 0)} and "
    see += f"{ms(seen.middle('others_s') or 0)}. A gap that stays is a straggler."
    lines = {"slowest rank": own, "median of the others": others}
    return Curve("Slowest rank", "ms a step", lines, see, log=True, zero=False)


def _memory(seen: Seen) -> Curve:
    points = seen.series("memory_mib")
    top = max((value for _, value in points), default=0.0)
    what = "its GPU" if seen.run.facts.get("device") == "cuda" else "its process"
    see = f"The most that any rank ever had of {what}: {top:,.0f} MiB. It starts anew with each launch; a slope that "
    see += "never ends is a leak."
    return Curve("Memory", "MiB, the largest rank", {"memory": points}, see)


def _mfu(seen: Seen) -> Curve:
    points = [(step, value * 100) for step, value in seen.series("mfu")]
    see = f"The median is {middle([v for _, v in points]) or 0:.1f} % of what the devices could compute at best."
    return Curve("MFU", "% of the peak FLOP/s", {"mfu": points}, see)


def _scale(seen: Seen) -> Curve:
    points = seen.series("loss_scale")
    skipped = [value for _, value in seen.series("skipped")]
    see = f"It halves when gradients overflow, and that step is left out: {max(skipped, default=0):.0f} were."
    return Curve("Loss scale", "factor", {"scale": points}, see, log=True, zero=False)
