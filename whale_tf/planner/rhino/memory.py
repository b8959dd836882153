"""Memory as a constraint (Rhino section 4.4): the largest parameters are forced into shards, as few of them as possible.

If activations are too large, forcing parameters does not help.  Then every byte gets a price in time.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Set

import networkx
import numpy as np

from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph
from whale_tf.planner.rhino.elimination import eliminate
from whale_tf.planner.rhino.liveness import LiveBytes, busiest, held
from whale_tf.planner.rhino.problem import MeshProblem

STEPS = 10


class Parameter(NamedTuple):
    """Variables that are stored alike because one op updates them together: a parameter and its slots.

    ``bytes``: of all of them, whole.
    """

    variables: Sequence[int]
    bytes: float


def parameters(problem: MeshProblem) -> List[Parameter]:
    """All groups, the largest first, and equally large ones in the order of the graph."""
    graph, groups = problem.graph, networkx.Graph()
    groups.add_nodes_from(problem.scope.variables)
    for op in problem.scope.ops:
        together = [graph.tensors[problem.scope.roots[t]].op for i, t in enumerate(graph.ops[op].inputs)
                    if problem.is_hard(op, i)]
        shapes = [problem.shapes.stored(graph.ops[v].outputs[0]) for v in together]
        groups.add_edges_from((together[0], v) for v, shape in zip(together, shapes) if shape == shapes[0])
    found = [Parameter(tuple(sorted(variables)), sum(problem.bytes(graph.ops[v].outputs[0]) for v in variables))
             for variables in networkx.connected_components(groups)]
    return sorted(found, key=lambda parameter: (-parameter.bytes, parameter.variables))


def sharded(problem: MeshProblem, forced: Set[int]) -> CostGraph:
    """The problem in which ``forced`` variables must not be stored whole if they can be divided."""
    extra = {}
    for variable in forced:
        count = len(problem.stored[variable])
        if count > 1:
            extra[problem.node_of[variable]] = [IMPOSSIBLE] + [0] * (count - 1)
    return problem.costs.adjusted(extra)


def stored_bytes(problem: MeshProblem, choice: Sequence[int]) -> float:
    """Bytes of all variables on one device."""
    return sum(problem.stored_bytes(v, problem.storage(v, choice)) for v in problem.scope.variables)


def priced(costs: CostGraph, sizes: LiveBytes, price: float) -> CostGraph:
    """The problem in which every byte that is alive at a place (``sizes``) costs ``price`` picoseconds."""
    nodes = {node: np.floor(price * row).astype(np.int64).tolist() for node, row in sizes.nodes.items()}
    return costs.adjusted(nodes, {pair: np.floor(price * table).astype(np.int64) for pair, table in sizes.pairs.items()})


def lower_bound(problem: MeshProblem, limit_bytes: float) -> int:
    """A lower bound in picoseconds for all choices within the limit: the Lagrangian dual ``min_x C(x) + p (bytes(x) - limit)``,
    at the best price ``p`` of a byte according to bisection.  ``bytes`` counts what is alive where the fastest choice holds
    most.

    Raises:
        TableTooLarge
    """
    free = eliminate(problem.costs)
    sizes = held(problem, busiest(problem, free.choice))
    best, low, high = free.cost, 0.0, 2.0 * free.cost / max(limit_bytes, 1.0)
    for _ in range(STEPS):
        price = (low + high) / 2
        found = eliminate(priced(problem.costs, sizes, price))
        best = max(best, int(found.cost - price * limit_bytes))
        if sizes.bytes(found.choice) > limit_bytes:
            low = price
        else:
            high = price
    return best
