"""The exact intra-TaskGraph balance: the smallest step time within memory, in whole units."""
from __future__ import annotations

import heapq
import math
from typing import List, Sequence, Tuple

from whale_tf.balance.problem import Balance, BalanceProblem


def exact(problem: BalanceProblem) -> Balance:
    """Minimises max_i u_i / s_i subject to sum u_i = U and m <= u_i <= c_i (capacity), u_i whole.  O(n log n).

    Method: take the largest step time T0 that is certainly a lower bound, give each device the units it finishes in
    T0, then give each remaining unit to the device that would finish its next unit first.

    Proof.  Let T* be the optimum and u* an optimal answer; a device "has room at T" if (u_i + 1) / s_i <= T and
    u_i < c_i.

    (1) Start.  Let T0 solve sum_i clip(s_i T, m, c_i) = U over real loads.  Below T0 even real loads cannot hold
        U, so T0 <= T*.  The start u_i = clip(floor(s_i T0), m, c_i) takes no longer than T*: floor(s_i T0) / s_i <= T0
        and m / s_i <= u*_i / s_i <= T*.  Its sum is at most U, as rounding down only reduces it.
    (2) Step.  Suppose sum u_i < U and no load takes longer than T*.  As sum u*_i = U, there is a device with
        u_i < u*_i; its next unit ends at (u_i + 1) / s_i <= u*_i / s_i <= T* and u_i < u*_i <= c_i, so some device has
        room at T*.  The device chosen ends its next unit no later, so again no load takes longer than T*.
    (3) The loop runs until sum u_i = U, at most n times as each floor removed less than one unit.  The result is
        feasible and takes at most T*, so it is optimal.

    In floating point, the start is lowered by one unit where possible, so that a rounded-up product cannot exceed
    T*; the comparisons in (2) use the same quotients whose maximum is the step time.

    Raises:
        InfeasibleError: no load fits; the message says which load would fit.
    """
    capacities = problem.check_feasible()
    speeds, minimum = problem.speeds, problem.minimum
    level = _water_level(speeds, capacities, minimum, problem.units)
    units = [max(minimum, math.floor(min(capacity, speed * level)) - 1) for speed, capacity in zip(speeds, capacities)]
    queue = [((unit + 1) / speeds[i], i) for i, unit in enumerate(units) if unit < capacities[i]]
    heapq.heapify(queue)
    for _ in range(problem.units - sum(units)):
        _, i = queue[0]
        units[i] += 1
        if units[i] < capacities[i]:
            heapq.heapreplace(queue, ((units[i] + 1) / speeds[i], i))
        else:
            heapq.heappop(queue)
    return Balance("exact", tuple(units))


def _water_level(speeds: Sequence[float], capacities: Sequence[int], minimum: int, units: int) -> float:
    """T with sum_i clip(s_i T, minimum, c_i) = units: the optimum over real loads.

    The left side is piecewise linear in T, with breakpoints at minimum / s_i and c_i / s_i; between breakpoints, the
    slope is the sum of the speeds of devices neither at their minimum nor full.
    """
    breaks: List[Tuple[float, float]] = []
    for speed, capacity in zip(speeds, capacities):
        breaks += [(minimum / speed, speed), (capacity / speed, -speed)]
    filled, level, slope = float(minimum * len(speeds)), 0.0, 0.0
    for place, change in sorted(breaks):
        if filled + slope * (place - level) >= units:
            break
        filled, level = filled + slope * (place - level), place
        slope += change
    return level + (units - filled) / slope if slope > 0 else level
