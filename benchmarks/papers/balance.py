"""Whale's Algorithm 1, Memory-Constraint Load Balancing (section 3.3.1): as printed, and repaired.

Both start from loads in proportion to speed.  While one device exceeds its memory and another does not, load is shifted
from the *peak* (the fullest device over memory) to the *valley* (the device within memory with the least work for its
speed).  As printed, the algorithm has two defects:

1. line 17 drops the peak from the list after any shift, even if the peak is still over its memory;
2. according to the text, the shift b is as large as the valley's room, which can exceed the peak's excess, so the
   peak may end far below the valley.

The repaired form shifts b = min(the peak's excess, the valley's room), and lists the peak for as long as it is over.
"""
from __future__ import annotations

import math
from typing import Callable, List, Mapping, Sequence, Tuple

from whale_tf import balance
from whale_tf.balance import Balance, BalanceProblem, apportion


def paper(problem: BalanceProblem) -> Balance:
    """Algorithm 1 as printed, its loads rounded to whole units by largest remainders; the answer may exceed memory."""
    return Balance("paper", tuple(apportion(printed_units(problem), problem.units, problem.minimum)))


def printed_units(problem: BalanceProblem) -> Tuple[float, ...]:
    """The units of Algorithm 1 as printed: loads start as fractions (line 4) and are shifted by whole units b."""
    speeds, total = problem.speeds, sum(problem.speeds)
    units = [problem.units * speed / total for speed in speeds]                                        # line 4
    mem_utils = memory_utilisation(problem, units)                                                     # line 5
    flop_utils = [unit / speed for unit, speed in zip(units, speeds)]                                  # line 6
    oom_devices = [i for i in range(len(speeds)) if mem_utils[i] > 1]                                  # lines 7, 8
    free_devices = [i for i in range(len(speeds)) if mem_utils[i] <= 1]                                # lines 9, 10
    while oom_devices and free_devices:                                                                # line 12
        peak = max(oom_devices, key=lambda i: mem_utils[i])                                            # line 13
        valley = min(free_devices, key=lambda i: (flop_utils[i], mem_utils[i]))                        # line 14
        b = min(_room(problem, units[valley], valley), math.floor(units[peak]))
        if b >= 1:                                                                                     # line 15
            units[peak] -= b
            units[valley] += b
            mem_utils = memory_utilisation(problem, units)                                             # line 16
            flop_utils = [unit / speed for unit, speed in zip(units, speeds)]
            oom_devices.remove(peak)                                                                   # line 17
        else:
            free_devices.remove(valley)                                                                # line 19
    return tuple(units)


def _room(problem: BalanceProblem, units: float, device: int) -> int:
    """Whole units that ``device`` can take before it is out of memory."""
    free_bytes = problem.memory_bytes[device] - problem.need_bytes(units)
    if problem.load_bytes == 0:
        return problem.units if free_bytes >= 0 else 0
    return max(0, math.floor(free_bytes * problem.units / problem.load_bytes))


def repaired(problem: BalanceProblem) -> Balance:
    """Algorithm 1 repaired, in whole units.

    It always ends within memory if some load fits: a shift either brings the peak within memory or fills the
    valley, and while a peak is over, the other devices together have room for its excess.

    Raises:
        InfeasibleError: no load fits.
    """
    capacities = problem.check_feasible()
    units: List[int] = list(apportion(problem.speeds, problem.units, problem.minimum))
    oom_devices = [i for i, unit in enumerate(units) if unit > capacities[i]]
    free_devices = [i for i, unit in enumerate(units) if unit <= capacities[i]]
    while oom_devices:
        mem_utils = memory_utilisation(problem, units)
        peak = max(oom_devices, key=lambda i: mem_utils[i])
        valley = min(free_devices, key=lambda i: (units[i] / problem.speeds[i], mem_utils[i]))
        b = min(units[peak] - capacities[peak], capacities[valley] - units[valley])
        units[peak] -= b
        units[valley] += b
        if units[peak] <= capacities[peak]:
            oom_devices.remove(peak)
        if units[valley] == capacities[valley]:
            free_devices.remove(valley)
    return Balance("repaired", tuple(units))


# the package's solvers beside them
SOLVERS: Mapping[str, Callable[[BalanceProblem], Balance]] = {
    "exact": balance.SOLVERS["exact"], "repaired": repaired, "paper": paper, **balance.SOLVERS}


# ---- scores ----------------------------------------------------------------------------------------------------------

def waste(problem: BalanceProblem, units: Sequence[float]) -> float:
    """Whale's Formula 1: sum_i |L_i - speed_i / sum(speed)|."""
    total = sum(problem.speeds)
    return sum(abs(unit / problem.units - speed / total) for unit, speed in zip(units, problem.speeds))


def memory_utilisation(problem: BalanceProblem, units: Sequence[float]) -> Tuple[float, ...]:
    """Each device's ratio of needed to available memory (Whale's mem_utils); above 1 is out of memory."""
    needs = [problem.need_bytes(unit) for unit in units]
    return tuple(need / memory if memory else (math.inf if need else 0.0)
                 for need, memory in zip(needs, problem.memory_bytes))
