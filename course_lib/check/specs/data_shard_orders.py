"""Exercise 08, first part: are the orders of several epochs shuffles that have nothing to do with each other?"""

from collections import Counter
from itertools import combinations

import numpy as np

from course_lib.check.group import Wrong

Orders = list[tuple[str, list[int]]]  # the call, and the order of the epoch: all of the same samples
NEAR = 0.3  # correlation of place and number, averaged over the orders: of 15 shuffles of 85 it is 0 +- 0.03
FOLLOWS = "the same sample follows the same one"  # in the words of a verdict, by which a mistake is known
TURNED = "the same two samples are neighbours, the other way round"
SHIFTED = "the sample of the one is that of the other plus"
MIRRORED = "the samples of the two together give"
NEARBY = "the correlation of place and number"
KEPT = "of these orders"


def neighbours(order: list[int]) -> set[tuple[int, int]]:
    """Each sample with the one after it, around the end."""
    return set(zip(order, [*order[1:], *order[:1]], strict=True))


def repeated(orders: Orders) -> Wrong | None:
    """Two epochs, or two seeds, have the same order."""
    for (one, a), (other, b) in combinations(orders, 2):
        if a == b:
            return Wrong("fresh", f"{one} and {other} give the same order.", 0)
    return None


def related(orders: Orders) -> Wrong | None:
    """More than half of an order follows from another one; of two shuffles it is a place or two."""
    for (one, a), (other, b) in combinations(orders, 2):
        for often, text in relations(a, b):
            if often > len(a) // 2:
                return Wrong("fresh", f"{one} and {other}: in {often} of {len(a)} places {text}.", 0)
    return None


def relations(a: list[int], b: list[int]) -> list[tuple[int, str]]:
    """In how many places each relation holds, and the relation in words."""
    count = len(a)
    turned = {(right, left) for left, right in neighbours(b)}
    step, shifted = Counter((y - x) % count for x, y in zip(a, b, strict=True)).most_common(1)[0]
    total, mirrored = Counter((y + x) % count for x, y in zip(a, b, strict=True)).most_common(1)[0]
    return [
        (len(neighbours(a) & neighbours(b)), FOLLOWS),
        (len(neighbours(a) & turned), TURNED),
        (shifted, f"{SHIFTED} {step}, modulo {count}"),
        (mirrored, f"{MIRRORED} {total}, modulo {count}"),
    ]


def placed(orders: Orders) -> Wrong | None:
    """Samples stay near their place, or one is at the same place in most orders."""
    text, first = orders[0]
    mean = float(np.mean([np.corrcoef(order, range(len(first)))[0, 1] for _, order in orders]))
    if abs(mean) > NEAR:
        begins = f"{str(first[:5])[:-1]}, ..."
        text = (
            f"{text} begins {begins}; over {len(orders)} epochs and seeds {NEARBY} is {mean:.2f}, of shuffles about 0"
        )
        return Wrong("sorted", f"{text}.", 0)
    for place in range(len(first)):
        sample, often = Counter(order[place] for _, order in orders).most_common(1)[0]
        if often > len(orders) // 2:
            text = f"sample {sample} is at place {place} in {often} {KEPT}"
            return Wrong("fresh", f"{len(orders)} epochs and seeds of {len(first)} samples: {text}.", 0)
    return None
