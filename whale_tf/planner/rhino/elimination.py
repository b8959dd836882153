"""Exact solution by eliminating one node after the other (min-sum variable elimination, Dechter 1999, "Bucket elimination").

Eliminating a node replaces it and its tables by one table over its neighbours, which holds the cost of the node's best choice for
each of their choices.  Three steps keep those tables small:

1. nodes with at most two neighbours are folded: this merges cones (Rhino section 4.3.2) and much more, and stays pairwise;
2. Goldstein's dead-end elimination (1994) drops a strategy if another is at least as good whatever the neighbours do;
3. the rest is eliminated in min-fill order.

Tables have numbers, and the elimination of a node is cached by the numbers of its tables, so a repeated layer is free.
"""

from __future__ import annotations

import heapq
import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph, Solution

MAX_ENTRIES = 20_000_000  # entries of one table: 160 MB
HUB = 12  # nodes with more neighbours come last
Scope = Tuple[int, ...]
Score = Tuple[int, float, float]


class TableTooLarge(Exception):
    """Elimination needs a table of more entries than allowed."""


class _Message(NamedTuple):
    """The result of eliminating a node: a table over its neighbours (None: all zero), its best choice, a constant."""

    table: Optional[int]
    best: np.ndarray
    constant: int


class Elimination:
    """The problem as it shrinks.

    Attributes:
        alive: the remaining nodes.
        unary: number of each node's table.
        factors: scope -> number of the table over it (one dimension for each node, in order).
        kept: for each node, the remaining ones of its original strategies.
        constant: the least cost of the eliminated part.
        folded: nodes eliminated; ``largest``: entries of the largest table; ``dropped``: strategies proven useless.
    """

    def __init__(self, graph: CostGraph, fixed: Optional[Dict[int, int]] = None) -> None:
        """Args:
        fixed: nodes whose strategy is given.
        """
        self.tables = graph.tables
        self.alive: Set[int] = set(range(len(graph.nodes)))
        self.unary: List[int] = list(graph.nodes)
        self.factors: Dict[Scope, int] = dict(graph.edges.items())
        self.kept: List[Optional[np.ndarray]] = [None] * len(graph.nodes)
        self.constant = 0
        self.folded = self.largest = self.dropped = 0
        self._scopes: List[Set[Scope]] = [set() for _ in graph.nodes]
        self._order: List[Tuple[int, Scope, np.ndarray, List[Optional[np.ndarray]]]] = []
        self._messages: Dict[object, _Message] = {}
        self._narrowed: Dict[Tuple[int, int, bytes], int] = {}
        for scope in self.factors:
            for node in scope:
                self._scopes[node].add(scope)
        for node, value in (fixed or {}).items():
            self._keep(node, np.array([value]))
        self._cut()

    # -- the way forth ------------------------------------------------------------------------------------------------
    def fold(self, max_degree: Optional[int] = 2, held: Sequence[int] = (), max_entries: int = MAX_ENTRIES) -> None:
        """Eliminate nodes with at most ``max_degree`` neighbours (None: all), except ``held`` ones, the cheapest first.

        Raises:
            TableTooLarge
        """
        keep = set(held)
        scores = {node: self._score(node, max_degree) for node in self.alive if node not in keep}
        heap = [(score, node) for node, score in scores.items() if score is not None]
        heapq.heapify(heap)
        while heap:
            score, node = heapq.heappop(heap)
            if node not in self.alive or scores[node] != score:
                continue
            touched = self._eliminate(node, max_entries)
            for other in touched:
                if other in scores:
                    now = self._score(other, max_degree)
                    if now != scores[other]:
                        scores[other] = now
                        if now is not None:
                            heapq.heappush(heap, (now, other))

    def _neighbours(self, node: int) -> List[int]:
        found = {other for scope in self._scopes[node] for other in scope}
        found.discard(node)
        return sorted(found)

    def _size(self, node: int) -> int:
        return len(self.tables.arrays[self.unary[node]])

    def _score(self, node: int, max_degree: Optional[int]) -> Optional[Score]:
        """Order of elimination: few neighbours, little fill-in, a small table."""
        neighbours = self._neighbours(node)
        if max_degree is not None and len(neighbours) > max_degree:
            return None
        size = sum(math.log(self._size(other)) for other in neighbours + [node])
        if len(neighbours) <= 2:
            return (0, 0.0, size)
        if len(neighbours) > HUB:  # counting its fill-in each time would cost more than it is worth
            return (2, float(len(neighbours)), size)
        near = {a: {b for scope in self._scopes[a] for b in scope} for a in neighbours if len(self._scopes[a]) <= HUB}
        fill = sum(self._size(a) * self._size(b) for i, a in enumerate(neighbours) for b in neighbours[i + 1:]
                   if (b not in near[a] if a in near else a not in near.get(b, ())))
        return (1, float(fill), size)

    def _eliminate(self, node: int, max_entries: int) -> Set[int]:
        """Returns the nodes whose order of elimination may have changed."""
        neighbours = tuple(self._neighbours(node))
        place = {other: i for i, other in enumerate(neighbours + (node,))}
        tables = sorted((self.factors[scope], tuple(place[other] for other in scope)) for scope in self._scopes[node])
        sizes = tuple(self._size(other) for other in neighbours)
        key = (self.unary[node], sizes, tuple(tables))
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = self._minimise(self.unary[node], sizes, tables, max_entries)
        self.constant += message.constant
        self._order.append((node, neighbours, message.best, [self.kept[other] for other in neighbours]))
        self.alive.discard(node)
        self.folded += 1
        for scope in self._scopes[node]:
            del self.factors[scope]
            for other in scope:
                if other != node:
                    self._scopes[other].discard(scope)
        self._scopes[node] = set()
        if message.table is not None:
            self._add(neighbours, message.table)
        touched = set(neighbours)
        if len(neighbours) > 2 or message.table is None:
            touched.update(other for near in neighbours for scope in self._scopes[near] for other in scope)
        return touched & self.alive

    def _minimise(self, unary: int, sizes: Tuple[int, ...], tables: List[Tuple[int, Scope]], max_entries: int) -> _Message:
        arrays, last = self.tables.arrays, len(sizes)
        shape = sizes + (len(arrays[unary]),)
        entries = int(np.prod([float(size) for size in shape]))
        self.largest = max(self.largest, entries)
        if entries > max_entries:
            raise TableTooLarge(f"a table of {entries:,} entries")
        total = arrays[unary].reshape((1,) * last + (-1,))
        for number, places in sorted(tables, key=lambda item: arrays[item[0]].size):
            order = sorted(range(len(places)), key=lambda i: places[i])
            wide = [1] * (last + 1)
            for i in order:
                wide[places[i]] = shape[places[i]]
            total = total + arrays[number].transpose(order).reshape(wide)
        total = np.broadcast_to(total, shape)
        best = np.asarray(total.argmin(axis=-1)).astype(np.int16)
        least = np.minimum(total.min(axis=-1), IMPOSSIBLE)
        constant = int(least.min())
        rest = np.where(least >= IMPOSSIBLE, IMPOSSIBLE, least - constant)
        if constant >= IMPOSSIBLE:
            rest = np.zeros_like(rest)
        return _Message(self.tables.number(rest) if last and rest.any() else None, best, constant)

    def _add(self, scope: Scope, table: int) -> None:
        if len(scope) == 1:
            self.unary[scope[0]] = self.tables.add(self.unary[scope[0]], table)
            return
        if scope in self.factors:
            table = self.tables.add(self.factors[scope], table)
        self.factors[scope] = table
        for node in scope:
            self._scopes[node].add(scope)

    # -- dead ends ----------------------------------------------------------------------------------------------------
    def drop_dead_ends(self, rounds: int = 6) -> None:
        """Goldstein's criterion on the remaining nodes, whose tables must be pairwise: ``a`` is dropped if some ``b`` has
        ``U(b) - U(a) + sum_edges max_x (E(b, x) - E(a, x)) <= 0``."""
        differences: Dict[Tuple[int, int], np.ndarray] = {}
        waiting = set(self.alive)
        for _ in range(rounds):
            now, waiting = sorted(waiting), set()
            for node in now:
                if self._size(node) > 1:
                    left = self._undominated(node, differences)
                    if len(left) < self._size(node):
                        self.dropped += self._size(node) - len(left)
                        self._keep(node, left)
                        waiting.update(self._neighbours(node) + [node])
            if not waiting:
                break
        self._cut()

    def _undominated(self, node: int, differences: Dict[Tuple[int, int], np.ndarray]) -> np.ndarray:
        worse = _excess(self.tables.arrays[self.unary[node]][:, None])
        for scope in self._scopes[node]:
            key = (self.factors[scope], scope.index(node))
            if key not in differences:
                table = self.tables.arrays[key[0]]
                differences[key] = _excess(table if key[1] == 0 else table.T)
            worse = np.minimum(worse + differences[key], IMPOSSIBLE)  # a sum of many would not fit 64 bits
        alive = np.ones(len(worse), dtype=bool)
        for a in range(len(worse)):
            alive[a] = not any(b != a and alive[b] and worse[b, a] <= 0 for b in range(len(worse)))
        return np.nonzero(alive)[0]

    def _keep(self, node: int, left: np.ndarray) -> None:
        """Restricts a node to some strategies."""
        before = self.kept[node]
        self.kept[node] = left if before is None else before[left]
        self.unary[node] = self._narrow(self.unary[node], 0, left)
        for scope in self._scopes[node]:
            self.factors[scope] = self._narrow(self.factors[scope], scope.index(node), left)

    def _narrow(self, table: int, axis: int, left: np.ndarray) -> int:
        key = (table, axis, left.tobytes())
        found = self._narrowed.get(key)
        if found is None:
            found = self._narrowed[key] = self.tables.number(np.take(self.tables.arrays[table], left, axis))
        return found

    def _cut(self) -> None:
        """Removes pairs that decide nothing: a table of zeros, or one whose node has a single strategy left."""
        for scope in [scope for scope in self.factors if len(scope) == 2]:
            table, single = self.factors[scope], [self._size(node) == 1 for node in scope]
            if any(single):
                axis = single.index(True)
                self._remove(scope)
                self._add((scope[1 - axis],), self._row(table, axis))
            elif not self.tables.arrays[table].any():
                self._remove(scope)

    def _remove(self, scope: Scope) -> None:
        del self.factors[scope]
        for node in scope:
            self._scopes[node].discard(scope)

    def _row(self, table: int, axis: int) -> int:
        """The only row (axis 0) or column (axis 1) of a table."""
        key = (table, axis, b"row")
        found = self._narrowed.get(key)
        if found is None:
            found = self._narrowed[key] = self.tables.number(np.take(self.tables.arrays[table], 0, axis))
        return found

    # -- the way back -------------------------------------------------------------------------------------------------
    def complete(self, choice: Dict[int, int]) -> List[int]:
        """The choice for all nodes, derived from the choice (among kept strategies) for the nodes that are alive."""
        found = {node: self._original(node, value) for node, value in choice.items()}
        for node, neighbours, best, kept in reversed(self._order):
            at = tuple(found[other] if left is None else int(np.searchsorted(left, found[other]))
                       for other, left in zip(neighbours, kept))  # strategies are numbered as when the node was eliminated
            found[node] = self._original(node, int(best[at]))
        return [found[node] for node in range(len(self.unary))]

    def _original(self, node: int, value: int) -> int:
        left = self.kept[node]
        return value if left is None else int(left[value])


def _excess(table: np.ndarray) -> np.ndarray:
    """``[b, a]``: the largest amount by which strategy ``b`` of the first dimension can cost more than ``a``."""
    difference = table[:, None, :] - table[None, :, :]
    return np.where(table[None, :, :] >= IMPOSSIBLE, -IMPOSSIBLE, difference).max(axis=-1)


def eliminate(graph: CostGraph, max_entries: int = MAX_ENTRIES) -> Solution:
    """The cheapest choice.

    Raises:
        TableTooLarge: the graph is too entangled for ``max_entries``; use the integer program.
    """
    work = Elimination(graph)
    work.fold()
    work.drop_dead_ends()
    work.fold(None, (), max_entries)
    choice = work.complete({})
    cost = graph.score(choice)
    return Solution(choice, cost, min(work.constant, cost), "elimination")
