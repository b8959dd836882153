"""Orders from playing a step: each position takes the steps that it can start first, and starts the best of them.

The forward and the backward step of one micro-batch in one TaskGraph take one unit of time each, and so do gradients of weights
if they are separate.  Otherwise a backward step takes two units.  Results reach other TaskGraphs at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from whale_tf.errors import PlanError
from whale_tf.program import WEIGHT
from whale_tf.schedule.step import BACKWARD, FORWARD, Step

Done = Mapping[Tuple[str, int], int]  # (kind, TaskGraph) -> how many micro-batches of it a position has run
Rank = Callable[[Step, Done], Optional[Tuple[int, ...]]]


def greedy(positions: Sequence[int], num_micro_batch: int, rank: Rank, splits: bool) -> List[List[Step]]:
    """The order of each position.

    Args:
        positions: of all TaskGraphs.  A TaskGraph needs the results of the previous one and the gradients of the next one.
        rank: among the steps that can start at one time, the one with the lowest rank starts; None means it may not start yet.
        splits: whether gradients of weights are separate steps.

    Raises:
        PlanError: ``rank`` makes all positions wait.
    """
    kinds = (FORWARD, BACKWARD, WEIGHT) if splits else (FORWARD, BACKWARD)
    ends: Dict[Step, int] = {}
    free, found = [0] * (max(positions) + 1), [[] for _ in range(max(positions) + 1)]  # type: List[int], List[List[Step]]
    done: List[Counter] = [Counter() for _ in free]
    here: List[List[int]] = [[t for t, own in enumerate(positions) if own == position] for position in range(len(free))]

    def first(position: int) -> Optional[Tuple]:
        """(start, rank, step) of the next step of a position, as far as known."""
        steps = [Step(kind, done[position][kind, t], t)
                 for t in here[position] for kind in kinds if done[position][kind, t] < num_micro_batch]
        keys = [(_ready(step, len(positions), ends), rank(step, done[position]), step) for step in steps]
        return min(((max(ready, free[position]), key, step) for ready, key, step in keys
                    if ready is not None and key is not None), default=None)

    following = [first(position) for position in range(len(free))]
    for _ in range(len(positions) * len(kinds) * num_micro_batch):
        start, _, step = min((one for one in following if one is not None), default=(0, (), None))
        if step is None:
            raise PlanError(f"no order for {len(positions)} TaskGraphs on {len(free)} positions and {num_micro_batch} "
                            "micro-batches: all wait for each other")
        position = positions[step.task_graph]
        ends[step] = free[position] = start + (2 if step.kind == BACKWARD and not splits else 1)
        done[position][step.kind, step.task_graph] += 1
        found[position].append(step)
        near = range(max(0, step.task_graph - 1), min(len(positions), step.task_graph + 2))
        for other in {positions[task_graph] for task_graph in near}:
            following[other] = first(other)
    return found


def _ready(step: Step, count: int, ends: Mapping[Step, int]) -> Optional[int]:
    """The time at which all inputs of a step are there; None if it is not known yet."""
    kind, task_graph = step.kind, step.task_graph
    needed = []
    if kind == FORWARD and task_graph:
        needed = [step._replace(task_graph=task_graph - 1)]
    elif kind == BACKWARD:
        needed = [step._replace(kind=FORWARD)] + [step._replace(task_graph=task_graph + 1)] * (task_graph < count - 1)
    elif kind == WEIGHT:
        needed = [step._replace(kind=BACKWARD)]
    times = [ends.get(one) for one in needed]
    return None if None in times else max([0] + times)  # type: ignore[type-var]
