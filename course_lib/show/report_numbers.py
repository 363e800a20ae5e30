"""What `course report` says in numbers: the verdict, where the time went, who was slow."""

from collections import Counter

from course_lib.show.report_read import Seen, is_number, middle, whole
from course_lib.show.report_rows import rows
from course_lib.train.pace import stands_out

MOST = 0.75  # of the rows in which a straggler is slow by far; two equal ranks take turns


def duration(seconds: float) -> str:
    """
    >>> duration(0.5), duration(75), duration(119.9), duration(7384)
    ('0.50 s', '1 min 15 s', '2 min 0 s', '2 h 3 min')
    """
    if seconds < 59.5:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def verdict(seen: Seen) -> str:
    """The run in one sentence; `why` is added by those who have room."""
    run, of = seen.run, f" of {seen.total}" if seen.total else ""
    words = {
        "finished": f"Finished: all {seen.total} steps are done",
        "stopped": f"Stopped after step {seen.step}{of}, to be continued",
        "failed": f"Failed after step {seen.step}{of}",
        "killed": f"Killed: the last step that is known is {seen.step}{of}",
        "running": f"Running: step {seen.step}{of} is done",
    }
    text = words.get(run.status, f"It is not known how the run ended; the last known step is {seen.step}{of}")
    if (score := accuracy(seen)) is not None:
        text += f", test accuracy {score}"
    if losses := seen.series("loss"):
        text += f", training loss {losses[-1][1]:.4f}"
    return f"{text} ({run.why})." if run.why else f"{text}."


def accuracy(seen: Seen) -> str | None:
    """The newest one, with its counts when they are recorded."""
    row = next((row for row in reversed(seen.run.rows("eval")) if is_number(row.get("accuracy"))), None)
    if row is None:
        return None
    counts = f" ({row['right']} of {row['samples']})" if whole(row.get("samples")) and "right" in row else ""
    return f"{row['accuracy']:.4f}{counts}"


def time_sentence(seen: Seen) -> str:
    """Where the time of a step went, by medians over the rows."""
    known = rows(seen)
    if not known:
        return "No row of training tells how long its steps took."
    kinds = {
        "waiting for data": [(row.data, row.seconds) for row in known if row.data is not None],
        "communication that nothing hid": [(row.exposed, row.seconds) for row in known if row.exposed is not None],
        "the rest": [(row.rest, row.seconds) for row in known],
    }
    parts = [
        f"{what} {middle([part / step for part, step in pairs]):.1%} ({ms(middle([part for part, _ in pairs]))})"
        for what, pairs in kinds.items()
        if pairs
    ]
    text = f"A step took {ms(middle([row.seconds for row in known]))} (median of {counted(known)}): {'; '.join(parts)}"
    return f"{text}. Each number is a median of its own, so they need not add up."


def counted(rows: list) -> str:
    """
    >>> counted([1]), counted([1, 2])
    ('1 row', '2 rows')
    """
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"


def ms(seconds: float) -> str:
    """
    >>> ms(0.01234), ms(1.5), ms(0.123)
    ('12.3 ms', '1,500 ms', '123 ms')
    """
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def slowest_counts(seen: Seen) -> Counter[int]:
    """How many rows name each rank as the slowest."""
    return Counter(row["slowest_rank"] for row in _comparing(seen))


def _comparing(seen: Seen) -> list[dict]:
    keys = ("slowest_rank", "slowest_s", "others_s")
    return [row for row in seen.run.rows("train") if all(is_number(row.get(key)) for key in keys)]


def straggler_sentence(seen: Seen) -> str:
    """Who was slow, by a rank's own time before it waits for anybody."""
    counts, named = slowest_counts(seen), _comparing(seen)
    if not named:
        return "One rank has nobody to wait for." if seen.ranks == 1 else "No row compares the ranks."
    rank, times = counts.most_common(1)[0]
    own = middle([row["slowest_s"] for row in named if row["slowest_rank"] == rank])
    others = middle([row["others_s"] for row in named if row["slowest_rank"] == rank])
    if own is None or others is None:
        return "No row compares the ranks with numbers."
    text = (
        f"Rank {rank} was the slowest in {times} of {len(named)} rows. In these it needed {ms(own)} a step before it "
        f"waited for anybody, and the others {ms(others)} (medians)"
    )
    slow = sum(row["slowest_rank"] == rank and stands_out(row["slowest_s"], row["others_s"]) for row in named)
    if slow >= MOST * len(named):
        return f"{text}. It was slow by far in {slow} rows: it is a straggler, and the others wait for it."
    if slow:
        return f"{text}. It was slow by far in only {slow} rows: chance or a busy machine, and no straggler."
    return f"{text}: no rank stands out."
