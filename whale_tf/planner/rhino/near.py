"""An answer that costs the search nearly as little as the best one.

The objective adds up what devices do beside each other, so answers of nearly equal cost may differ in simulation.  A step of few
products is played within a fraction of a second, so one of these answers is handed over with the best one.  It differs from it
in the pattern of at least one product; everything else is chosen anew.
"""

from __future__ import annotations

from typing import List, Optional

from whale_tf.ir.graph import Phase
from whale_tf.planner.rhino.assignment import WORTH_DIVIDING, assignment_of
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, Solution
from whale_tf.planner.rhino.integer_program import solve
from whale_tf.planner.rhino.liveness import peak_bytes
from whale_tf.planner.rhino.memory import stored_bytes
from whale_tf.planner.rhino.mesh import PICOSECONDS
from whale_tf.planner.rhino.search import Answer, Level

NEAR = 1.1  # cost relative to that of the best answer
FEW = 4  # forward products, look-ups and losses; the search runs again for every other pattern of each


def near_answer(answer: Answer, limit_bytes: float) -> Optional[Answer]:
    """The next answer that divides something; None if it costs much more, for a large graph, or if memory decided.

    Args:
        limit_bytes: memory of one device.
    """
    (problem, solution), *others = answer.levels
    ops = [op for op in problem.scope.ops
           if problem.graph.ops[op].phase is Phase.FORWARD and problem.graph.ops[op].type in WORTH_DIVIDING]
    if others or answer.forced or answer.byte_price or len(ops) > FEW:
        return None
    found: List[Solution] = []
    for op in ops:
        if op in problem.pins:
            continue
        strategies, taken = problem.candidates[op].strategies, problem.strategy(op, solution.choice).pattern
        for pattern in dict.fromkeys(strategy.pattern for strategy in strategies if strategy.pattern != taken):
            only = [0 if strategy.pattern == pattern else IMPOSSIBLE for strategy in strategies]
            other = solve(problem.costs.adjusted({problem.node_of[op]: only}))
            if other.cost <= NEAR * solution.cost:
                found.append(other)
    for one in sorted(found, key=lambda one: one.cost):
        near = answer._replace(
            levels=(Level(problem, one),), seconds=one.cost / PICOSECONDS, stored_bytes=stored_bytes(problem, one.choice),
            peak_bytes=peak_bytes(problem, one.choice))
        if near.peak_bytes <= limit_bytes and assignment_of(near).strategies:
            return near
    return None
