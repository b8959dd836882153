"""``init: sharded``: initial values are made in parts, each on the device that keeps it (Rhino section 6.3).

Strategies are followed back from the initial ``Assign`` of a divided variable: each op takes the strategy whose result is spread
like the variable, constants are cut, and random numbers are drawn part by part.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional

import numpy as np

from whale_tf.errors import UnsupportedOpError
from whale_tf.ir.graph import Op, OpGraph, Phase
from whale_tf.patterns.sources import source
from whale_tf.patterns.spread import Spread
from whale_tf.patterns.strategy import RESEEDED, SHARDS, Sizes, Strategy, giving
from whale_tf.planner.sharding.assignment import Assignment


def with_initial_values(graph: OpGraph, initializers: Mapping[int, int], assignment: Assignment) -> Assignment:
    """The assignment with strategies for the initial values of its variables.

    Args:
        initializers: variable op -> the write that initialises it.

    Raises:
        UnsupportedOpError: a value cannot be made in parts; the message names the variable and the op.
    """
    walk = _Walk(graph, assignment)
    for variable, spread in assignment.variables.items():
        if variable in initializers:
            walk.variable(graph.ops[variable], graph.ops[initializers[variable]], spread)
    return assignment._replace(
        strategies={**assignment.strategies, **walk.strategies}, task_graph={**assignment.task_graph, **walk.task_graph},
        reseeded=tuple(walk.reseeded))


class _Walk:
    def __init__(self, graph: OpGraph, assignment: Assignment) -> None:
        self._graph, self._homes = graph, assignment.task_graph
        self._view = Sizes(graph)
        self.strategies: Dict[int, Strategy] = {}
        self.task_graph: Dict[int, int] = {}
        self.reseeded: List[str] = []

    def variable(self, variable: Op, write: Op, spread: Spread) -> None:
        self.strategies[write.id] = Strategy("initial", SHARDS, (spread,) * len(write.inputs), (spread,) * len(write.outputs))
        self.task_graph[write.id] = task_graph = self._homes[variable.id]
        pending = [(write.inputs[1], spread)]
        while pending:
            tensor, need = pending.pop()
            op = self._graph.producer(tensor)
            if op.id in self.strategies:  # another variable starts from the same value, so its parts are regrouped
                continue
            strategy = self._strategy(op, self._graph.tensors[tensor].index, need) if op.phase is Phase.INIT else None
            if strategy is None and self._is_small(tensor, variable, spread):
                continue
            if strategy is None:
                raise UnsupportedOpError(_whole(variable, op))
            self.strategies[op.id], self.task_graph[op.id] = strategy, task_graph
            if strategy.how == RESEEDED:
                self.reseeded.append(op.name)
            pending += [(t, s) for t, s in zip(op.inputs, strategy.needs) if s.is_shard]

    def _is_small(self, tensor: int, variable: Op, spread: Spread) -> bool:
        """Whether a tensor has no more elements than a part of the variable, so that it is computed whole and sliced."""
        shape = self._view.shape(tensor)
        if shape is None or None in shape:
            return False
        sizes = [size or 0 for size in shape]
        return int(np.prod(sizes)) <= int(np.prod(variable.attrs["shape"])) // sum(spread.sizes) * min(spread.sizes)

    def _strategy(self, op: Op, result: int, spread: Spread) -> Optional[Strategy]:
        return source(op, self._view, spread) or giving(op, self._view, result, spread)


def _whole(variable: Op, op: Op) -> str:
    return (f"init is 'sharded', but the initial value of {variable.name!r}, which wh.split divides over devices, cannot be made "
            f"in parts: op {op.name!r} ({op.type}) gives it whole; use an initializer that works element by element (zeros, "
            "constants, random numbers and arithmetic on them), or init 'exact'")
