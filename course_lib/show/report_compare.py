"""Several runs side by side: who is how fast for how many ranks, and whether that may be compared at all."""

from dataclasses import dataclass
from html import escape

from course_lib.show.report_chart import chart
from course_lib.show.report_numbers import verdict
from course_lib.show.report_page import table
from course_lib.show.report_read import Seen, is_number, middle

MOST_LINES = 5
# What makes a sample cost something else. The batch is looked at by itself.
_JOB = ("data.augment", "data.side", "amp.dtype", "ddp.comm_hook", "optim.name", "optim.zero")


@dataclass(frozen=True)
class Place:
    """A run in the table: samples/s over the rows of its newest number of ranks, and its efficiency or None."""

    seen: Seen
    speed: float | None
    efficiency: float | None


def places(runs: list[Seen]) -> list[Place]:
    """By ranks. Efficiency: samples/s a rank, against the run with the fewest ranks."""
    ordered = sorted(runs, key=lambda seen: seen.ranks)
    speeds = [speed(seen) for seen in ordered]
    base = next(((seen.ranks, fast) for seen, fast in zip(ordered, speeds, strict=True) if fast and seen.ranks), None)
    return [
        Place(seen, fast, fast / seen.ranks / (base[1] / base[0]) if base and fast and seen.ranks else None)
        for seen, fast in zip(ordered, speeds, strict=True)
    ]


def speed(seen: Seen) -> float | None:
    """The median samples/s of the launches with as many ranks as the newest one."""
    alike, found = True, []
    for row in seen.run.metrics:
        if row["event"] == "start":
            alike = row.get("ranks", seen.ranks) == seen.ranks
        elif row["event"] == "train" and alike and is_number(row.get("samples_per_s")):
            found.append(float(row["samples_per_s"]))
    return middle(found)


def unlike(runs: list[Seen]) -> list[str]:
    """Why efficiency means little, in sentences; empty when the runs did the same work."""
    kinds = {
        "recipe": [seen.run.facts.get("recipe") for seen in runs],
        "data": [seen.data.get("name") for seen in runs],
        "device": [seen.run.facts.get("device") for seen in runs],
        **{name: [seen.option(name) for seen in runs] for name in _JOB},
    }
    for name in sorted({name for seen in runs for name in seen.run.config.get("model", {})}):
        kinds[f"model.{name}"] = [seen.option(f"model.{name}") for seen in runs]
    differ = {name: sorted({str(value) for value in values}) for name, values in kinds.items()}
    found = [f"{name}: {' against '.join(values)}." for name, values in differ.items() if len(values) > 1]
    return [*found, *_batches(runs)]


def _batches(runs: list[Seen]) -> list[str]:
    a_rank = sorted({f"{seen.option('data.batch')} x {seen.option('data.accumulate')}" for seen in runs})
    whole = {seen.option("data.global_batch") for seen in runs}
    if len(a_rank) == 1:
        return []
    words = f"The batch of a rank (samples x microbatches) differs: {' against '.join(a_rank)}"
    if len(whole) == 1:
        return [f"{words}. The global batch is the same (strong scaling), so with more ranks each has less to compute."]
    return [f"{words}, and so does the global batch."]


def comparison(runs: list[Seen]) -> str:
    """The HTML above the runs: their verdicts, the table, what differs, the losses on each other."""
    lines = []
    for place in places(runs):
        seen = place.seen
        fast = f"{place.speed:,.0f}" if place.speed else "not measured"
        share = f"{place.efficiency:.1%}" if place.efficiency is not None else ""
        batch = f"{seen.option('data.global_batch')} ({seen.option('data.batch')} x {seen.option('data.accumulate')})"
        lines.append([seen.name, seen.ranks or "?", batch, fast, share, verdict(seen)])
    head = ["run", "ranks", "global batch (a rank)", "samples/s", "efficiency", ""]
    return f"<h1>{len(runs)} runs</h1>\n{table(head, lines, right={1, 3, 4})}\n{_words(runs)}\n{_losses(runs)}"


def _words(runs: list[Seen]) -> str:
    fewest = min((seen.ranks for seen in runs if seen.ranks), default=0)
    text = f"Efficiency is samples/s a rank, against the run with the fewest ranks ({fewest})."
    reasons = unlike(runs)
    if not reasons:
        return f"<p>{text} The runs have the same recipe, data, network and batch a rank (weak scaling).</p>"
    rows = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<p>{text}</p>\n<div class="note">The runs are not comparable without thought:<ul>{rows}</ul></div>'


def _losses(runs: list[Seen]) -> str:
    lines = {}
    for number, seen in enumerate(runs[:MOST_LINES], 1):
        name = seen.name[-22:]
        if points := seen.series("loss"):
            lines[name if name not in lines else f"{name} ({number})"] = points
    if not lines:
        return ""
    ends = "; ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in lines.items())
    more = f" Only the first {MOST_LINES} runs are drawn." if len(runs) > MOST_LINES else ""
    picture = chart(lines, "training loss (nats)", log=True)
    return (
        f'<figure class="alone"><h3>Training loss</h3>{picture}<figcaption>{escape(ends)}.{more}</figcaption></figure>'
    )
