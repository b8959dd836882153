"""Loads by speed alone, memory ignored: even shares, and shares in proportion to speed."""
from __future__ import annotations

import math
from typing import Sequence, Tuple

from whale_tf.balance.problem import Balance, BalanceProblem, answer


def even(problem: BalanceProblem) -> Balance:
    """Equal loads (the baseline of Whale's Figures 17 and 18); the remainder goes to the first devices."""
    return answer("even", apportion([1.0] * len(problem.speeds), problem.units, problem.minimum))


def proportional(problem: BalanceProblem) -> Balance:
    """L_i = speed_i / sum(speed), the start of Whale's Algorithm 1 (line 4), in whole units."""
    return answer("proportional", apportion(problem.speeds, problem.units, problem.minimum))


def apportion(weights: Sequence[float], total: int, minimum: int = 0) -> Tuple[int, ...]:
    """``total`` whole units in proportion to ``weights``, at least ``minimum`` each (largest remainders).

    Who would get less than the minimum gets the minimum, and the rest is divided among the others.  Ties go to the
    first.
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
