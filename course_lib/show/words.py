"""Numbers as people read them: "1.5 MB", "0.2 ms", "ranks 0 to 3"."""

from collections.abc import Iterable


def size(nbytes: int) -> str:
    """Bytes in decimal units (1 MB = 1,000,000 B), three digits at most.

    >>> size(4), size(1_500_000), size(999_999), size(64_000)
    ('4 B', '1.5 MB', '1 MB', '64 kB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            break
    return f"{_three_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """A time span in the unit that fits.

    >>> duration(0.0002), duration(0.0123), duration(1.5), duration(0.000004)
    ('0.2 ms', '12.3 ms', '1.5 s', '0.004 ms')
    """
    if seconds >= 1:
        return f"{_three_digits(seconds)} s"
    ms = seconds * 1000
    return f"{_three_digits(ms) if ms >= 1 else f'{ms:.2g}'} ms"


def ranks(numbers: Iterable[int]) -> str:
    """Name ranks.

    >>> ranks([2]), ranks([0, 1, 2, 3]), ranks([0, 2]), ranks([])
    ('rank 2', 'ranks 0 to 3', 'ranks 0 and 2', 'no rank')
    """
    found = sorted(set(numbers))
    if not found:
        return "no rank"
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"ranks {found[0]} to {found[-1]}"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "message"), count(10_000, "message")
    ('1 message', '10,000 messages')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _three_digits(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
