"""Loads that ignore memory: even shares, and shares in proportion to speed."""
from __future__ import annotations

from whale_tf.balance.problem import Balance, BalanceProblem
from whale_tf.ir.parts import apportion, even_sizes


def even(problem: BalanceProblem) -> Balance:
    """Equal loads (the baseline of Whale's Figures 17 and 18); the remainder goes to the first devices."""
    return Balance("even", tuple(even_sizes(problem.units, len(problem.speeds))))


def proportional(problem: BalanceProblem) -> Balance:
    """L_i = speed_i / sum(speed), the start of Whale's Algorithm 1 (line 4), in whole units."""
    return Balance("proportional", tuple(apportion(problem.speeds, problem.units, problem.minimum)))
