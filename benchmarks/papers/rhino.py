"""Rhino's optimisation level O2: cuts the graph at its critical nodes (sections 4.3.1 and 4.3.2).

If each op takes one unit of time, the ops whose earliest and latest start agree are the backbone.  The contractions and
convolutions on it are the *critical nodes*, and the ops between two of them are a *segment*.  Each segment is solved for every
pair of strategies of its two ends, and dynamic programming along the chain chooses the critical nodes' strategies.  With those
given, the rest is solved again as a whole, so the answer is exact except for the critical nodes.

Edges that leave a segment go from forward ops and weights to the backward pass.  Without them, products of the backward pass are
chosen as if whole weights and whole gradients cost nothing (up to 83% worse).  So the far ends of these edges are assumed to have
the strategies that compute fastest, which are divided ones, and tensors with many readers are assumed to be everywhere.  A second
try assumes one copy of everything.  The better answer counts, and further ``rounds`` start from it.
"""

from __future__ import annotations

import bisect
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from whale_tf.ir.traits import traits
from whale_tf.patterns.spread import everywhere
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph, Solution
from whale_tf.planner.rhino.elimination import MAX_ENTRIES, Elimination, TableTooLarge, eliminate
from whale_tf.planner.rhino.integer_program import integer_program
from whale_tf.planner.rhino.problem import MeshProblem

Edge = Tuple[int, int]


class Coarse(NamedTuple):
    """Attributes:
    critical: critical ops, in order.
    segment: node of the strategy problem -> number of its segment; segment ``i`` ends with critical node ``i``.
    ops: number of ops in the graph, for the proportion (Rhino Table 5).
    """

    critical: Sequence[int]
    segment: Sequence[int]
    ops: int

    @property
    def segments(self) -> int:
        """Subgraphs between critical nodes."""
        return max(len(self.critical) - 1, 0)


def coarsen(problem: MeshProblem) -> Coarse:
    """Critical nodes and segments of a graph."""
    graph = problem.graph
    members = set(problem.scope.ops)
    before = {op: [graph.tensors[t].op for t in graph.ops[op].inputs if graph.tensors[t].op in members]
              for op in problem.scope.ops}
    earliest: Dict[int, int] = {}
    for op in problem.scope.ops:
        earliest[op] = 1 + max([earliest[source] for source in before[op]] or [-1])
    last = max(earliest.values(), default=0)
    latest = dict.fromkeys(problem.scope.ops, last)
    for op in reversed(problem.scope.ops):
        for source in before[op]:
            latest[source] = min(latest[source], latest[op] - 1)
    heavy = [op for op in problem.scope.ops if traits(graph.ops[op].type).is_contraction and earliest[op] == latest[op]]
    critical = sorted(heavy, key=lambda op: earliest[op])
    times = [earliest[op] for op in critical]
    segment = [0] * len(problem.costs.nodes)
    for op in problem.scope.ops:
        segment[problem.node_of[op]] = bisect.bisect_left(times, earliest[op])
    for tensor, relay in problem.relays.items():
        maker = graph.tensors[tensor].op
        segment[relay] = bisect.bisect_left(times, earliest.get(maker, 0))
    first: Dict[int, int] = {}
    for (u, v) in problem.costs.edges:
        for node, other in ((u, v), (v, u)):
            first[node] = min(first.get(node, len(times)), segment[other])
    for variable in problem.scope.variables:  # in the segment of its first user
        node = problem.node_of[variable]
        segment[node] = first.get(node, 0)
    return Coarse(critical, segment, len(graph.ops))


def o2(problem: MeshProblem, costs: CostGraph) -> Solution:
    """Solves with O2, or the integer program if its tables become too large."""
    try:
        return solve_segments(problem, costs)
    except TableTooLarge:
        return integer_program(costs, fold=True)


def solve_segments(problem: MeshProblem, costs: CostGraph, max_entries: int = MAX_ENTRIES, rounds: int = 0) -> Solution:
    """Solves with O2.  ``lower_bound`` is trivial: nothing is proven.

    Args:
        costs: the problem's costs, possibly modified.
        rounds: how often to solve the segments again with the edges that leave them priced by the answer so far, while that
            helps.

    Raises:
        TableTooLarge
    """
    segments = _Segments(problem, costs)
    arrays = costs.tables.arrays
    divided = [int(arrays[table].argmin()) for table in costs.nodes]
    for tensor, relay in problem.relays.items():  # relays cost nothing themselves
        if everywhere in problem.relayed[tensor]:
            divided[relay] = problem.relayed[tensor].index(everywhere)
    best = min((segments.solve(guess, max_entries) for guess in (divided, [0] * len(divided))), key=lambda found: found.cost)
    for _ in range(rounds):
        found = segments.solve(best.choice, max_entries)
        if found.cost >= best.cost:
            break
        best = found
    if best.cost >= IMPOSSIBLE:  # the ends contradict each other once all edges count
        return eliminate(costs, max_entries)
    return best


class _Segments:
    """A problem cut at its critical nodes."""

    def __init__(self, problem: MeshProblem, costs: CostGraph) -> None:
        self._costs = costs
        coarse = coarsen(problem)
        self._nodes = [problem.node_of[op] for op in coarse.critical]
        place = {node: i for i, node in enumerate(self._nodes)}
        self._inside: List[List[int]] = [[] for _ in range(len(self._nodes) + 1)]
        for node, number in enumerate(coarse.segment):
            if node not in place:
                self._inside[number].append(node)
        self._edges, self._crossing = _edges_of(costs, coarse, place)

    def solve(self, guess: Sequence[int], max_entries: int) -> Solution:
        """Solves the critical nodes by dynamic programming along the chain, then everything else as a whole.

        Args:
            guess: assumed strategies of the far ends of edges that leave a segment.
        """
        costs, nodes = self._costs, self._nodes
        assumed = costs.adjusted(self._assumed(guess))
        chain = _copy(assumed, nodes)
        for number, members in enumerate(self._inside):
            ends = [i for i in (number - 1, number) if 0 <= i < len(nodes)]
            _add_segment(assumed, chain, [nodes[i] for i in ends] + members, ends, self._edges[number], max_entries)
        decided = Elimination(chain)
        decided.fold(None, (), max_entries)
        found = decided.complete({})
        work = Elimination(costs, fixed={node: found[i] for i, node in enumerate(nodes)})
        work.fold()
        work.drop_dead_ends()
        work.fold(None, (), max_entries)
        choice = work.complete({})
        cost = costs.score(choice)
        return Solution(choice, cost, min(0, cost), "segments")

    def _assumed(self, guess: Sequence[int]) -> Dict[int, List[int]]:
        """The cost of the edges that leave segments, for their nodes."""
        arrays = self._costs.tables.arrays
        extra: Dict[int, np.ndarray] = {}
        for u, v in self._crossing:
            table = arrays[self._costs.edges[u, v]]
            for node, row in ((u, table[:, guess[v]]), (v, table[guess[u]])):
                extra[node] = np.minimum(extra.get(node, 0) + row, IMPOSSIBLE)
        return {node: row.tolist() for node, row in extra.items()}


def _copy(costs: CostGraph, nodes: Sequence[int]) -> CostGraph:
    """The problem of some nodes, without edges."""
    other = CostGraph()
    other.tables = costs.tables
    other.nodes = [costs.nodes[node] for node in nodes]
    return other


def _edges_of(costs: CostGraph, coarse: Coarse, place: Mapping[int, int]) -> Tuple[List[List[Edge]], List[Edge]]:
    """Edges of each segment (between its nodes, and between them and its ends), and those that leave their segment."""
    found: List[List[Edge]] = [[] for _ in range(len(place) + 1)]
    crossing: List[Edge] = []
    for u, v in costs.edges:
        numbers = [({place[node], place[node] + 1} if node in place else {coarse.segment[node]}) for node in (u, v)]
        common = numbers[0] & numbers[1]
        if common:
            found[max(common)].append((u, v))
        else:
            crossing.append((u, v))
    return found, crossing


def _add_segment(costs: CostGraph, chain: CostGraph, nodes: Sequence[int], ends: Sequence[int],
                 edges: Sequence[Tuple[int, int]], max_entries: int) -> None:
    """Adds to the chain the cost of a segment's best solution, for each pair of strategies of its ends (the first ``nodes``)."""
    number = {node: i for i, node in enumerate(nodes)}
    part = _copy(costs, nodes)
    for i in range(len(ends)):  # the ends' own costs are the chain's
        part.nodes[i] = costs.tables.number(np.zeros(part.domain(i)))
    for u, v in edges:
        part.add_edge(number[u], number[v], costs.edges[u, v])
    work = Elimination(part)
    work.fold(None, range(len(ends)), max_entries)
    for i, end in enumerate(ends):
        chain.nodes[end] = costs.tables.add(chain.nodes[end], work.unary[i])
    for scope, table in work.factors.items():
        chain.add_edge(ends[scope[0]], ends[scope[1]], table)
