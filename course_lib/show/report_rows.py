"""The rows of training as `course report` counts them: how long a step took, and on what."""

import math
from dataclasses import dataclass

from course_lib.show.report_read import Seen, is_number, whole
from course_lib.train.order import Order


@dataclass(frozen=True)
class Row:
    """A row of training: its step, how many steps and samples it stands for, and seconds of each of these steps."""

    step: int
    steps: int
    samples: int
    seconds: float
    data: float | None  # seconds a step that a rank waited for data, mean over the ranks
    exposed: float | None  # seconds of a step that a rank only waited for all-reduces, mean over the ranks

    @property
    def rest(self) -> float:
        """Seconds a step of everything else."""
        return max(self.seconds - (self.data or 0) - (self.exposed or 0), 0)


def rows(seen: Seen) -> list[Row]:
    """The rows of training whose time is known: samples divided by samples/s."""
    order, found, last = _order(seen), [], 0
    for row in seen.run.metrics:
        if row["event"] == "start":
            last = row["step"]
        if row["event"] != "train" or not order:
            continue
        first, last = last, row["step"]
        speed = row.get("samples_per_s")
        if last <= first or not is_number(speed) or not 0 < speed < math.inf:
            continue
        samples = _samples(order, first, last)
        seconds = samples / speed / (last - first)
        data, share = row.get("data_wait"), row.get("comm_share")
        exposed = share * seconds if is_number(share) else None
        found.append(Row(last, last - first, samples, seconds, data if is_number(data) else None, exposed))
    return found


def _order(seen: Seen) -> Order | None:
    samples, batch = whole(seen.data.get("train")), whole(seen.option("data.global_batch"))
    return Order(0, samples, batch, bool(seen.option("data.drop_last"))) if samples >= batch > 0 else None


def _samples(order: Order, first: int, last: int) -> int:
    """Of the steps after `first` up to `last`; the last step of an epoch may have fewer than a global batch."""
    ends = last // order.per_epoch - first // order.per_epoch
    return (last - first) * order.global_batch - ends * (order.global_batch - order.count(order.per_epoch))


def training_seconds(seen: Seen) -> float:
    """All steps of all rows together."""
    return sum(row.seconds * row.steps for row in rows(seen))
