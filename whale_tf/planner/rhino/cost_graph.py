"""The strategy problem as numbers (Rhino section 4.2): nodes with a cost for each strategy, edges with one for each pair.

``C = sum_i comp[i][x_i] + sum_(u,v) comm[u,v][x_u, x_v]`` in whole picoseconds, so that answers compare exactly.  Equal tables
are kept once and have a number.  Repeated layers have the same tables, so results derived from them are computed only once.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.errors import PlanError

IMPOSSIBLE = 1 << 56  # picoseconds (20 hours); a sum of a hundred of them still fits 64 bits


class Solution(NamedTuple):
    """Attributes:
    choice: the strategy of every node.
    cost: picoseconds; ``IMPOSSIBLE`` or more if there is no solution.
    lower_bound: no choice costs less; equal to ``cost`` if the answer is proven to be optimal.
    solver: name of the solver.
    """

    choice: List[int]
    cost: int
    lower_bound: int
    solver: str

    @property
    def is_optimal(self) -> bool:
        return self.cost == self.lower_bound


class Tables:
    """Arrays by number.  Equal arrays have equal numbers, and so have equal sums and rows."""

    def __init__(self) -> None:
        self.arrays: List[np.ndarray] = []
        self._numbers: Dict[Tuple[Tuple[int, ...], bytes], int] = {}
        self._sums: Dict[Tuple[int, int], int] = {}

    def number(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array, dtype=np.int64)
        key = (array.shape, array.tobytes())
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.arrays)
            self.arrays.append(array)
        return found

    def add(self, first: int, second: int) -> int:
        key = (first, second) if first < second else (second, first)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = self.number(np.minimum(self.arrays[first] + self.arrays[second], IMPOSSIBLE))
        return found


class CostGraph:
    """A sum of one table for every node and one for every edge.

    Attributes:
        nodes: number of the table `[strategies]` of each node.
        edges: ``(u, v)`` with ``u < v`` -> number of the table `[strategies of u, strategies of v]`.
    """

    def __init__(self) -> None:
        self.tables = Tables()
        self.nodes: List[int] = []
        self.edges: Dict[Tuple[int, int], int] = {}
        self._turned: Dict[int, int] = {}

    def add_node(self, costs: Sequence[int]) -> int:
        """Adds a node and returns its number.

        Raises:
            PlanError: the node has no strategy.
        """
        if not len(costs):
            raise PlanError(f"node {len(self.nodes)} of the strategy problem has no strategy; give every node at least one")
        self.nodes.append(self.tables.number(np.minimum(np.asarray(costs, dtype=np.int64), IMPOSSIBLE)))
        return len(self.nodes) - 1

    def add_edge(self, u: int, v: int, table: int) -> None:
        """Add a table (by number, `[strategies of u, strategies of v]`) to the edge of two nodes.

        Raises:
            PlanError: a table of another shape.
        """
        shape = (self.domain(u), self.domain(v))
        if self.tables.arrays[table].shape != shape:
            raise PlanError(f"the table of edge ({u}, {v}) has shape {self.tables.arrays[table].shape}, expected "
                            f"{shape}: one row for each strategy of the first node"
                            )
        if u == v:
            diagonal = np.minimum(self.tables.arrays[table].diagonal(), IMPOSSIBLE)
            self.nodes[u] = self.tables.add(self.nodes[u], self.tables.number(diagonal))
            return
        if u > v:
            u, v, table = v, u, self.turned(table)
        self.edges[u, v] = self.tables.add(self.edges[u, v], table) if (u, v) in self.edges else table

    def adjusted(self, extra: Mapping[int, Sequence[int]],
                 pairs: Optional[Mapping[Tuple[int, int], np.ndarray]] = None) -> CostGraph:
        """The same problem with costs added to some nodes (`[strategies]` for each) and to pairs of nodes (see ``edges``)."""
        other = CostGraph()
        other.tables, other.edges, other._turned = self.tables, dict(self.edges), self._turned
        other.nodes = list(self.nodes)
        for node, costs in extra.items():
            other.nodes[node] = self.tables.add(self.nodes[node], self.tables.number(np.asarray(costs)))
        for (u, v), table in (pairs or {}).items():
            other.add_edge(u, v, self.tables.number(table))
        return other

    def turned(self, table: int) -> int:
        """The transposed table's number."""
        found = self._turned.get(table)
        if found is None:
            found = self._turned[table] = self.tables.number(self.tables.arrays[table].T)
        return found

    def domain(self, node: int) -> int:
        return len(self.tables.arrays[self.nodes[node]])

    def score(self, choice: Sequence[int]) -> int:
        """The cost of a choice, summed term by term, to check every solver.

        Raises:
            PlanError: a choice of another length, or a strategy that a node does not have.
        """
        if len(choice) != len(self.nodes) or any(not 0 <= x < self.domain(v) for v, x in enumerate(choice)):
            raise PlanError(f"a choice for {len(choice)} nodes was given to a problem of {len(self.nodes)}, or names "
                            f"a strategy that a node does not have"
                            )
        arrays = self.tables.arrays
        total = sum(int(arrays[table][x]) for table, x in zip(self.nodes, choice))
        return total + sum(int(arrays[table][choice[u], choice[v]]) for (u, v), table in self.edges.items())
