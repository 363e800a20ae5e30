"""Sets of moments: lists of (start, end), in any unit. What `union` returns is sorted and without touching pieces."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """Every moment that is in at least one piece; empty pieces vanish.

    >>> union([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)])
    [(0, 4), (5, 7)]
    """
    found: list[Interval] = []
    for start, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Every moment that is in `a` and in `b`.

    >>> intersection([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    left, right, found = union(a), union(b), []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            found.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Every moment that is in `a` and not in `b`.

    >>> difference([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    holes = union(b)
    edges = [float("-inf"), *(edge for hole in holes for edge in hole), float("inf")]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def total(pieces: Iterable[Interval]) -> float:
    """Length of the union.

    >>> total([(0, 2), (1, 3), (5, 6)])
    4
    """
    return sum(end - start for start, end in union(pieces))
