"""Partitions of a whole number: examples of a mini-batch, elements of a divided dimension."""

from __future__ import annotations

import math
from typing import Sequence, Tuple


def even_sizes(total: int, count: int) -> Tuple[int, ...]:
    """``total`` divided into ``count`` parts that differ by at most one, larger ones first: 10 into 3 is 4, 3, 3."""
    return tuple((total + count - 1 - i) // count for i in range(count))


def apportion(weights: Sequence[float], total: int, minimum: int = 0) -> Tuple[int, ...]:
    """``total`` whole units divided in proportion to ``weights``, at least ``minimum`` each (largest remainders).

    A part that would be below the minimum is raised to it, and the rest is divided among the others.  The first part wins ties.
    """
    free = list(range(len(weights)))
    shares = [float(minimum)] * len(weights)
    while free:
        scale = (total - minimum * (len(weights) - len(free))) / sum(weights[i] for i in free)
        small = [i for i in free if weights[i] * scale < minimum]
        if not small:
            for i in free:
                shares[i] = weights[i] * scale
            break
        free = [i for i in free if i not in small]
    units = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (units[i] - shares[i], i))
    for i in by_remainder[:total - sum(units)]:
        units[i] += 1
    return tuple(units)
