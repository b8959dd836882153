"""The strategy problem as an integer linear program: the certificate of the elimination, and its fallback.

Rhino section 4.2 has a variable ``A >= X_u + X_v - 1`` for each pair of strategies, whose relaxation is worthless (A = 0).  The
equality form's is tight: the pairs of an edge are a joint distribution of which the nodes' choices are the marginals::

    min   sum_v comp[v][j] X[v,j] + sum_(u,v) comm[u,v][i,j] A[u,v,i,j]
    s.t.  sum_j X[v,j] = 1                     for every node
          sum_j A[u,v,i,j] = X[u,i]            for every edge and strategy of u
          sum_i A[u,v,i,j] = X[v,j]            for every edge and strategy of v
          X in {0,1},  A >= 0,  no A where the pair is impossible
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from whale_tf.errors import InfeasibleError
from whale_tf.planner.rhino.cost_graph import IMPOSSIBLE, CostGraph, Solution
from whale_tf.planner.rhino.elimination import MAX_ENTRIES, Elimination, TableTooLarge, eliminate
from whale_tf.planner.rhino.scip import new_solver

UNIT = 1e6  # the program counts microseconds
Scope = Tuple[int, ...]


def integer_program(graph: CostGraph, seconds: float = 60.0, fold: bool = False) -> Solution:
    """The cheapest choice found by SCIP within a time limit.

    Args:
        fold: fold nodes with two neighbours first, which changes neither the answer nor the bound.

    Raises:
        InfeasibleError: no choice is possible, or none was found in time.
        MissingPackageError: there is no ortools with SCIP.
    """
    work = Elimination(graph)
    if fold:
        work.fold()
        work.drop_dead_ends()
    choice, bound = _Program(work, seconds).run()
    answer = work.complete(choice)
    cost = graph.score(answer)
    if cost >= IMPOSSIBLE:
        raise InfeasibleError("the strategy problem has no solution: some tensors have no layout that all their users accept")
    slack = max(2, int(1e-6 * cost))  # SCIP's own tolerance
    lower = work.constant + int(bound * UNIT)
    return Solution(answer, cost, cost if lower >= cost - slack else lower, "integer program")


def solve(graph: CostGraph, max_entries: int = MAX_ENTRIES, seconds: float = 60.0) -> Solution:
    """Solves by elimination or, if its tables grow past ``max_entries``, by the integer program of what is left after folding.

    Raises:
        InfeasibleError, MissingPackageError: see :func:`integer_program`.
    """
    try:
        return eliminate(graph, max_entries)
    except TableTooLarge:
        return integer_program(graph, seconds, fold=True)


class _Program:
    """The program of the remaining nodes."""

    def __init__(self, work: Elimination, seconds: float) -> None:
        self._solver, self._work = new_solver(), work
        self._solver.SetTimeLimit(int(seconds * 1000))
        self._objective = self._solver.Objective()
        self._nodes: Dict[int, List[Any]] = {}
        for node in sorted(work.alive):
            self._add_node(node)
        for scope, table in sorted(work.factors.items()):
            self._add_edge(scope, table)
        self._objective.SetMinimization()

    def _cost(self, variable: Any, picoseconds: int) -> None:
        if picoseconds:
            self._objective.SetCoefficient(variable, picoseconds / UNIT)

    def _add_node(self, node: int) -> None:
        total = self._solver.Constraint(1.0, 1.0)
        self._nodes[node] = []
        for j, cost in enumerate(self._work.tables.arrays[self._work.unary[node]].tolist()):
            variable = self._solver.IntVar(0.0, 0.0 if cost >= IMPOSSIBLE else 1.0, f"x_{node}_{j}")
            total.SetCoefficient(variable, 1.0)
            self._cost(variable, 0 if cost >= IMPOSSIBLE else cost)
            self._nodes[node].append(variable)

    def _add_edge(self, scope: Scope, table: int) -> None:
        u, v = scope
        costs = self._work.tables.arrays[table]
        rows = [self._marginal(variable) for variable in self._nodes[u]]
        columns = [self._marginal(variable) for variable in self._nodes[v]]
        for i, row in enumerate(costs.tolist()):
            for j, cost in enumerate(row):
                if cost < IMPOSSIBLE:
                    pair = self._solver.NumVar(0.0, 1.0, "")
                    rows[i].SetCoefficient(pair, 1.0)
                    columns[j].SetCoefficient(pair, 1.0)
                    self._cost(pair, cost)

    def _marginal(self, variable: Any) -> Any:
        constraint = self._solver.Constraint(0.0, 0.0)
        constraint.SetCoefficient(variable, -1.0)
        return constraint

    def run(self) -> Tuple[Dict[int, int], float]:
        """The choice of each remaining node (among its kept strategies), and the program's bound."""
        if not self._nodes:
            return {}, 0.0
        status = self._solver.Solve()
        if status not in (self._solver.OPTIMAL, self._solver.FEASIBLE):
            raise InfeasibleError("the integer program of {} nodes {}".format(
                len(self._nodes), "has no solution: some tensors have no layout that all their users accept"
                if status == self._solver.INFEASIBLE else "found no solution in time; allow it more seconds"))
        choice = {node: _largest([v.solution_value() for v in variables]) for node, variables in self._nodes.items()}
        return choice, self._objective.BestBound()


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda j: values[j])


