"""What `course report` says about one run, section by section."""

from html import escape
from pathlib import Path

from course_lib.show.report_chart import LONG
from course_lib.show.report_curves import curves, figure
from course_lib.show.report_events import events, kept, resumes, utc
from course_lib.show.report_numbers import (
    accuracy,
    duration,
    slowest_counts,
    straggler_sentence,
    time_sentence,
    verdict,
)
from course_lib.show.report_options import UNKNOWN, command, options
from course_lib.show.report_page import table
from course_lib.show.report_read import Seen, whole
from course_lib.show.report_rows import training_seconds


def sections(seen: Seen) -> str:
    """Everything about one run, from its verdict to the command that goes on with it."""
    parts = (_curves, _time, _launches, _events)
    made = [head(seen), *(part(seen) for part in parts), _checkpoints(seen.run.dir), _options(seen)]
    return "\n".join(filter(None, made))


def head(seen: Seen) -> str:
    """The name, the verdict, and what was run."""
    note = f'<p class="note">{escape(str(seen.data["note"]))}</p>' if seen.data.get("note") else ""
    facts = [[name, value] for name, value in _facts(seen) if value]
    return (
        f'<h1>{escape(seen.name)}</h1>\n<p class="verdict">{escape(verdict(seen))}</p>\n{note}'
        f"{table([], facts)}{_failure(seen)}"
    )


def _facts(seen: Seen) -> list[tuple[str, str]]:
    facts, config = seen.run.facts, seen.option
    speed, seconds = seen.middle("samples_per_s"), training_seconds(seen)
    batch, losses = f"{config('data.global_batch')} samples", seen.series("loss")
    if seen.ranks:
        batch += f" = {config('data.batch')} a rank x {seen.ranks} rank{'s' * (seen.ranks > 1)}"
        batch += f" x {config('data.accumulate')} microbatches" if whole(config("data.accumulate")) > 1 else ""
    an_epoch = whole(facts.get("steps_per_epoch"))
    device = f"{facts.get('device', '?')}, backend {facts.get('backend', '?')}"
    parameters = f", {facts['parameters']:,} parameters" if whole(facts.get("parameters")) else ""
    data = "{}: {} to train, {} to test".format(*(seen.data.get(key, "?") for key in ("name", "train", "test")))
    return [
        ("recipe", str(facts.get("recipe", "?"))),
        ("data", data),
        ("network", f"{config('model.name')}{parameters}"),
        ("ranks", str(seen.ranks or "")),
        ("global batch", batch),
        ("steps", f"{seen.step} of {seen.total}" + (f", {an_epoch} an epoch" if an_epoch else "")),
        ("duration", f"{duration(seconds)} in steps; evaluation, saving, starts are not recorded" if seconds else ""),
        ("speed", f"{speed:,.0f} samples/s" if speed else ""),
        ("test accuracy", accuracy(seen) or ""),
        ("training loss", f"{losses[-1][1]:.4f} at step {losses[-1][0]}" if losses else ""),
        ("machine", f"{device}, torch {facts.get('torch', '?')}, Python {facts.get('python', '?')}"),
    ]  # fmt: skip


def _failure(seen: Seen) -> str:
    """The traceback of the rank that failed, when status.json has one."""
    if seen.run.status != "failed" or not seen.run.details.get("traceback"):
        return ""
    rank = seen.run.details.get("rank", "?")
    return f"<h2>What rank {escape(str(rank))} raised</h2>\n<pre>{escape(str(seen.run.details['traceback']))}</pre>"


def _curves(seen: Seen) -> str:
    made = [figure(curve, resumes(seen), seen.step) for curve in curves(seen)]
    if not made:
        return "<h2>Curves</h2>\n<p>No step was logged.</p>"
    long = len(seen.run.rows("train")) > LONG
    words = "<p>Strong lines are medians of neighbouring rows; faint ones go through all.</p>\n" if long else ""
    return f'<h2>Curves</h2>\n{words}<div class="curves">{"".join(made)}</div>'


def _time(seen: Seen) -> str:
    counts = slowest_counts(seen)
    lines = [[f"rank {rank}", times] for rank, times in sorted(counts.items())]
    ranking = table(["", "rows in which it was the slowest"], lines, right={1}) if lines else ""
    return (
        f"<h2>Where the time went</h2>\n<p>{escape(time_sentence(seen))}</p>\n"
        f"<h2>Slow ranks</h2>\n<p>{escape(straggler_sentence(seen))}</p>\n{ranking}"
    )


def _events(seen: Seen) -> str:
    found = events(seen)
    bad = {k for k, event in enumerate(found) if event.kind in ("warning", "stall", "failed", "killed", "unknown")}
    lines = [[event.step, event.kind, event.text] for event in found]
    return f"<h2>Events</h2>\n{table(['step', 'event', ''], lines, bad, {0})}"


def _launches(seen: Seen) -> str:
    """Each start of the run: when, from where to where, and how it ended."""
    found = seen.run.launches
    lines = [
        [utc(one.began), whole(one.ranks) or "?", one.first, one.last, f"{one.status}: {one.why}".removesuffix(": ")]
        for one in found
    ]
    bad = {k for k, one in enumerate(found) if one.status in ("failed", "killed")}
    head = ["began (UTC)", "ranks", "from step", "to step", "how it ended"]
    return f"<h2>Launches</h2>\n{table(head, lines, bad, {1, 2, 3})}" if found else ""


def _checkpoints(folder: Path) -> str:
    found = kept(folder)
    if not found:
        return "<h2>Checkpoints</h2>\n<p>None is there.</p>"
    lines = [
        [one.step, f"{one.size / 2**20:.2f} MiB", f"damaged: {one.damage}" if one.damage else "whole, by its manifest"]
        for one in found
    ]
    bad = {k for k, one in enumerate(found) if one.damage}
    return f"<h2>Checkpoints</h2>\n{table(['step', 'size', ''], lines, bad, {0, 1})}"


def _options(seen: Seen) -> str:
    found = options(seen)
    lines = [
        [option.name, option.value, "not known" if option.default is UNKNOWN else option.default] for option in found
    ]
    marked = {k for k, option in enumerate(found) if option.differs}
    known = f"Different from the recipe, and marked: {len(marked)}."
    if all(option.default is UNKNOWN for option in found):
        known = "The recipe is not one of the course's, so what differs from it is not known."
    return (
        "<h2>Start or go on</h2>\n<p>With the same run folder it goes on from the newest whole checkpoint; with a new "
        "one it begins. This is for one machine: nodes are not recorded. Start it in the same folder as before when "
        f"paths are relative.</p>\n<pre>{escape(command(seen))}</pre>\n"
        f"<h2>Options</h2>\n<p>{known}</p>\n{table(['option', 'value', 'of the recipe'], lines, marked)}"
    )
