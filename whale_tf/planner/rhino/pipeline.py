"""Pipeline stages as an integer program with tightened bounds (Rhino section 5).

Unit ``i`` gets stage ``B_i``.  A consumer's stage is not before its producer's, and the bytes of tensors between stages are
minimal::

    min sum_t F_t bytes_t       B_j >= B_i,  F_t = 1 where some reader j of tensor t has B_j > B_i,  no stage is empty

**Bounds** (section 5.2): with ``T`` = all work / number of stages, the units before unit ``i`` (its ancestors ``A_i``) and after
it (its descendants ``D_i``) leave it the stages of perfect balance, give or take ``epsilon`` stages::

    floor(work(A_i) / T - epsilon)  <=  B_i  <=  stages - 1 - floor(work(D_i) / T - epsilon)

The paper prints the second bound as a ceiling counted from the start.  Counted from the end, as here, it mirrors the first
bound, and a chain with ``epsilon`` 0 has its cut within the unit that straddles it.

Bounds alone do not balance parallel branches, so no stage may have more than ``(1 + epsilon) T`` and one unit.

The paper defines ``F`` by a big ``M`` on ``B_j - B_i``, whose relaxation is weak.  Here ``y[i,s]`` says whether ``B_i >= s``.
Edges are ``y[i,s] <= y[j,s]`` and ``F_t >= y[j,s] - y[i,s]``, and bounds fix variables, so that few remain.  A tensor counts
once, however many units read it (the paper counts edges).
"""

from __future__ import annotations

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.planner.rhino.scip import linear_solver, new_solver

SECONDS, BALANCE_SECONDS = 10.0, 2.0  # for one program
GAP = 0.01  # of the fullest stage's work


class Flow(NamedTuple):
    """A tensor: its producer, its readers, its bytes."""

    producer: int
    readers: Tuple[int, ...]
    bytes: int


class StageProblem(NamedTuple):
    """Units in topological order with their work (any unit of time), and the tensors between them."""

    work: Sequence[float]
    flows: Sequence[Flow]


class Stages(NamedTuple):
    """Attributes:
    of: stage of every unit.
    bytes: bytes that cross between stages.
    lower_bound: no assignment within the bounds has fewer crossing bytes; equal to ``bytes`` if that is proven.
    """

    of: Tuple[int, ...]
    bytes: int
    lower_bound: int

    @property
    def is_optimal(self) -> bool:
        return self.bytes == self.lower_bound


def bounds(problem: StageProblem, count: int, epsilon: float) -> List[Tuple[int, int]]:
    """First and last stage of every unit (see the module).

    Raises:
        PlanError: units are not in topological order, or ``epsilon`` is negative.
    """
    if epsilon < 0:
        raise PlanError(f"the tolerance of unequal stages is {epsilon}, expected at least 0")
    total = len(problem.work)
    before: List[int] = [0] * total  # sets as bits
    for flow in sorted(problem.flows, key=lambda flow: flow.producer):
        for reader in flow.readers:
            if not 0 <= flow.producer < reader < total:
                raise PlanError(f"unit {reader} reads a result of unit {flow.producer}; units must be numbered in "
                                f"topological order, from 0 to {total - 1}"
                                )
            before[reader] |= before[flow.producer] | 1 << flow.producer
    ancestors, descendants = [0.0] * total, [0.0] * total
    for unit in range(total):
        for other in _bits(before[unit]):
            ancestors[unit] += problem.work[other]
            descendants[other] += problem.work[unit]
    each = sum(problem.work) / count or 1.0
    found = []
    for unit in range(total):
        first = min(max(math.floor(ancestors[unit] / each - epsilon + 1e-9), 0), count - 1)
        last = count - 1 - max(math.floor(descendants[unit] / each - epsilon + 1e-9), 0)
        found.append((first, max(first, min(last, count - 1))))
    for flow in sorted(problem.flows, key=lambda flow: flow.producer):  # work of nothing may lie on a boundary
        for reader in flow.readers:
            first, last = found[reader]
            first = max(first, found[flow.producer][0])
            found[reader] = (first, max(first, last))
    return found


def _bits(number: int) -> List[int]:
    return [place for place, bit in enumerate(reversed(bin(number)[2:])) if bit == "1"]


def crossing_bytes(problem: StageProblem, of: Sequence[int]) -> int:
    """The bytes that cross between stages, to check every solver."""
    return sum(flow.bytes for flow in problem.flows if any(of[reader] != of[flow.producer] for reader in flow.readers))


def most_work(problem: StageProblem, count: int, epsilon: float) -> float:
    """The most work of one stage: an equal part, the tolerance, and one unit, because units are not divided."""
    return (1 + epsilon) * sum(problem.work) / count + max(problem.work, default=0.0)


def stage_program(problem: StageProblem, count: int, epsilon: float, balanced: bool = False) -> Stages:
    """SCIP's assignment with the fewest crossing bytes.

    Args:
        balanced: minimise the work of the fullest stage instead, within :data:`GAP` (``lower_bound`` then says nothing).

    Raises:
        InfeasibleError: the bounds leave some stage without a unit, or nothing was found in time.
        PlanError: see :func:`bounds`.
        MissingPackageError: there is no ortools with SCIP.
    """
    program = _Program(problem, count, bounds(problem, count, epsilon))
    if balanced:
        program.balance()
    else:
        program.limit(most_work(problem, count, epsilon))
    of, bound = program.run(BALANCE_SECONDS if balanced else SECONDS, GAP if balanced else 0.0)
    if of is None:
        raise InfeasibleError(
            f"{len(problem.work)} units cannot be divided into {count} stages with a tolerance of {epsilon} stages; "
            f"use fewer stages, or a larger tolerance")
    crossing = crossing_bytes(problem, of)
    if balanced:
        return Stages(of, crossing, 0)
    slack = max(0.5, 1e-6 * crossing)  # SCIP's own tolerance
    return Stages(of, crossing, crossing if bound >= crossing - slack else max(0, int(math.ceil(bound - slack))))


class _Program:
    """``reached[unit][s]``: whether the unit's stage is at least ``s``.  A number if the bounds decide it, otherwise a
    variable."""

    def __init__(self, problem: StageProblem, count: int, allowed: Sequence[Tuple[int, int]]) -> None:
        self._solver = new_solver()
        self._problem, self._count, self._total = problem, count, sum(problem.work) or 1.0
        self._reached = [self._row(count, first, last) for first, last in allowed]
        crossings = []
        for flow in problem.flows:
            crosses = self._solver.NumVar(0.0, 1.0, "")
            for reader in flow.readers:
                for stage in range(1, count):
                    here, there = self._reached[flow.producer][stage], self._reached[reader][stage]
                    if not isinstance(there, int) or not isinstance(here, int):
                        self._solver.Add(there - here >= 0)
                    if not (isinstance(here, int) and here == 1) and not (isinstance(there, int) and there == 0):
                        self._solver.Add(crosses >= there - here)
            crossings.append(flow.bytes * crosses)
        for stage in range(count):
            self._occupy(stage, allowed)
        self._solver.Minimize(self._solver.Sum(crossings))

    def _row(self, count: int, first: int, last: int) -> List[Any]:
        row = [1 if s <= first else 0 if s > last else self._solver.IntVar(0.0, 1.0, "") for s in range(count + 1)]
        for s in range(first + 1, last):
            self._solver.Add(row[s] >= row[s + 1])
        return row

    def _inside(self, unit: int, stage: int) -> Any:
        return self._reached[unit][stage] - self._reached[unit][stage + 1]

    def _occupy(self, stage: int, allowed: Sequence[Tuple[int, int]]) -> None:
        """Requires some unit in the stage."""
        units = [unit for unit, (first, last) in enumerate(allowed) if first <= stage <= last]
        if not any(allowed[unit] == (stage, stage) for unit in units):
            self._solver.Add(self._solver.Sum([self._inside(unit, stage) for unit in units]) >= 1)

    def limit(self, work: float) -> None:
        """Limits the work of every stage."""
        self._limit(work / self._total)

    def balance(self) -> None:
        """Makes the fullest stage's work the objective."""
        most = self._solver.NumVar(0.0, 1.0, "most")
        self._limit(most)
        self._solver.Minimize(most)

    def _limit(self, most: Any) -> None:
        for stage in range(self._count):
            self._solver.Add(self._solver.Sum([amount / self._total * self._inside(unit, stage)
                                               for unit, amount in enumerate(self._problem.work)]) <= most)

    def run(self, seconds: float, gap: float) -> Tuple[Optional[Tuple[int, ...]], float]:
        """The stage of every unit (None if there is no solution), and the program's bound."""
        self._solver.SetTimeLimit(int(seconds * 1000))
        parameters = linear_solver().MPSolverParameters()
        parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, gap)
        if self._solver.Solve(parameters) not in (self._solver.OPTIMAL, self._solver.FEASIBLE):
            return None, 0.0
        of = tuple(sum(value if isinstance(value, int) else int(value.solution_value() > 0.5) for value in row[1:self._count])
                   for row in self._reached)
        return of, float(self._solver.Objective().BestBound())
