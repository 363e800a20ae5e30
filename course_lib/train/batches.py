"""How many samples: of a step over all ranks, of a rank at a time, and how many times before an update.

One product holds always, and any number that is left at 0 follows from it:

    global_batch = batch x accumulate x ranks
"""

from typing import TypeVar

from course_lib.train.errors import ConfigError

T = TypeVar("T")


def settle(global_batch: int, batch: int, accumulate: int, ranks: int) -> tuple[int, int, int]:
    """The three numbers (global_batch, batch, accumulate), none of them 0.

    >>> settle(48, 0, 0, ranks=2)  # a rank's part at once
    (48, 24, 1)
    >>> settle(48, 8, 0, ranks=2)  # no more than 8 at a time
    (48, 8, 3)
    >>> settle(0, 8, 4, ranks=2)  # grows with the ranks
    (64, 8, 4)

    Raises ConfigError when they do not divide or do not fit each other.
    """
    if not global_batch and not batch:
        raise ConfigError(
            "--data.global_batch must be at least 1, or follow from --data.batch (samples of a rank at a time), "
            "but both are 0."
        )
    if not global_batch:
        return batch * ranks * max(accumulate, 1), batch, max(accumulate, 1)
    if batch and accumulate and batch * ranks * accumulate != global_batch:
        raise ConfigError(
            f"--data.batch {batch} x {ranks} ranks x --data.accumulate {accumulate} is {batch * ranks * accumulate} "
            f"samples, but --data.global_batch is {global_batch}; set one of the three to 0, and it follows from the "
            "other two."
        )
    unit = ranks * (batch or max(accumulate, 1))  # what the global batch must be a multiple of
    if global_batch % unit:
        lower, upper = global_batch // unit * unit, (global_batch // unit + 1) * unit
        among = f"{ranks} ranks"
        if batch:
            among += f" in microbatches of {batch}"
        elif accumulate > 1:
            among += f" and {accumulate} microbatches"
        would_do = f"{lower} or {upper}" if lower else f"{upper}"
        raise ConfigError(
            f"A global batch of {global_batch} cannot be divided among {among}; "
            f"--data.global_batch {would_do} would do."
        )
    times = global_batch // unit
    return (global_batch, batch, times) if batch else (global_batch, times, max(accumulate, 1))


def microbatches(share: int, batch: int) -> int:
    """How many microbatches a rank's share of a step makes. An empty share is one: its rank must take part.

    >>> [microbatches(share, batch=8) for share in (0, 1, 8, 20)]
    [1, 1, 1, 3]
    """
    return max(1, -(-share // batch))


def pieces(share: list[T], batch: int) -> list[list[T]]:
    """The microbatches themselves: full ones, then the rest.

    >>> pieces([1, 2, 3, 4, 5], batch=2), pieces([], batch=2)
    ([[1, 2], [3, 4], [5]], [[]])
    """
    return [share[start : start + batch] for start in range(0, len(share), batch)] or [[]]


def sizes(share: int, batch: int) -> set[int]:
    """How many samples the microbatches of a share have.

    >>> sorted(sizes(20, batch=8)), sorted(sizes(0, batch=8))
    ([4, 8], [0])
    """
    return {len(piece) for piece in pieces(list(range(share)), batch)}
