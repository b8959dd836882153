"""The exact partition into pipeline stages: cuts and device order with the smallest latency, within memory."""
from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf.balance.stages import PartitionProblem, StagePartition, interval_sums
from whale_tf.errors import InfeasibleError, PlanError

MAX_STATES = 4096

State = Tuple[int, ...]


class _Step(NamedTuple):
    """The next stage uses a device of ``kind``; ``after`` counts the devices used after it."""

    kind: int
    after: State


class _Solution(NamedTuple):
    total: float  # sum of stage times and transfers
    pace: float  # the longest of them
    cuts: Tuple[int, ...]
    kinds: Tuple[int, ...]


def exact_stages(problem: PartitionProblem) -> StagePartition:
    """Minimises L = sum + (M - 1) * pace over all cuts and device orders.

    Devices of equal speed and memory form one kind, so a partial pipeline is described by its first op and the number of
    devices used of each kind: a small table.  Two dynamic programmes run over it, by NumPy min-plus products of
    one [n + 1, n + 1] matrix for each kind and stage:

    * the smallest possible pace, m0 (min-max);
    * for a cap m on the pace, the smallest sum S(m) of any pipeline whose stages and transfers all take at most m.

    L* = min over m of S(m) + (M - 1) m, with m among the finitely many stage and transfer times.  S falls as m grows,
    so between two solved caps lo < hi every answer with pace in (lo, hi) costs at least S(hi) + (M - 1) * next(lo);
    if that is no better than the best answer found, the interval is dropped, else it is halved (branch and bound;
    the same idea solves AMP's layer assignment).  If the answer for a cap has a smaller pace a, (a, cap] can be
    skipped: S cannot be smaller there.  So every pace is either solved or bounded, and the result is optimal.

    Raises:
        InfeasibleError: no partition fits in memory; the message gives the smallest excess found.
        PlanError: more than :data:`MAX_STATES` combinations of different devices; use ``fixed_order``.
    """
    tables = _Tables(problem)
    slowest = tables.solve(math.inf)
    if slowest is None:
        raise InfeasibleError(
            f"no way to cut {len(problem.flops)} ops into {len(problem.speeds)} stages fits in memory; use more stages, more "
            "micro-batches, recomputation or larger devices")
    best = _branch_and_bound(problem, tables, slowest)
    return StagePartition("exact", best.cuts, tables.devices(best.kinds))


def _branch_and_bound(problem: PartitionProblem, tables: _Tables, slowest: _Solution) -> _Solution:
    """See :func:`exact_stages`; ``slowest`` is the answer without a cap."""
    rest = problem.micro_batches - 1

    def latency(solution: _Solution) -> float:
        return solution.total + rest * solution.pace

    paces = tables.paces(tables.smallest_pace(), slowest.pace)
    fastest = tables.solve(paces[0])
    assert fastest is not None
    best = min(fastest, slowest, key=latency)
    intervals = [(0, len(paces) - 1, slowest.total)]
    while intervals:
        low, high, total_high = intervals.pop()
        if low + 1 >= high or total_high + rest * paces[low + 1] >= latency(best):
            continue
        middle = (low + high) // 2
        solution = tables.solve(paces[middle])
        assert solution is not None
        best = min(best, solution, key=latency)
        intervals.append((middle, high, total_high))
        intervals.append((low, int(np.searchsorted(paces, solution.pace)), solution.total))
    return best


class _Tables:
    """Stage costs and the dynamic programmes over them.

    Arrays are [first op, end op]: the stage of ops first..end-1, including the transfer after it; illegal stages are
    infinite.
    """

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self.size = len(problem.flops)
        self.kinds = self._kinds()
        self.full: State = tuple(len(members) for members in self.kinds)
        self.steps = self._all_steps()
        handover = np.array(problem.handover_s + (0.0,))
        ends = np.concatenate([[0.0], handover])
        self.cost: List[np.ndarray] = []
        self.pace: List[np.ndarray] = []
        for members in self.kinds:
            times = interval_sums(problem.flops) / problem.speeds[members[0]]
            self.cost.append(times + ends)
            self.pace.append(np.maximum(times, ends))
        places = {(step.kind, sum(state)) for state, steps in self.steps.items() for step in steps}
        self.legal = {place: self._legal(*place) for place in places}

    def _kinds(self) -> List[List[int]]:
        """Groups of interchangeable devices."""
        if self.problem.fixed_order:
            return [[device] for device in range(len(self.problem.speeds))]
        groups: Dict[Tuple[float, float], List[int]] = {}
        for device, key in enumerate(zip(self.problem.speeds, self.problem.memory_bytes)):
            groups.setdefault(key, []).append(device)
        return list(groups.values())

    def _all_steps(self) -> Dict[State, List[_Step]]:
        """All states, each after those it leads to."""
        if self.problem.fixed_order:
            stages = len(self.kinds)
            line = [tuple(int(device < used) for device in range(stages)) for used in range(stages + 1)]
            return {line[used]: [_Step(used, line[used + 1])] for used in reversed(range(stages))}
        count = int(np.prod([size + 1 for size in self.full]))
        if count > MAX_STATES:
            raise PlanError(f"{len(self.kinds)} unlike devices have {count} combinations, more than {MAX_STATES}; give "
                            "fixed_order=True with the devices in the order of the stages")
        states = [tuple(int(part) for part in index) for index in np.ndindex(*[size + 1 for size in self.full])]
        return {state: [_Step(kind, state[:kind] + (used + 1,) + state[kind + 1:])
                        for kind, used in enumerate(state) if used < self.full[kind]]
                for state in reversed(states) if state != self.full}

    def _legal(self, kind: int, stage: int) -> np.ndarray:
        """The stages [first, end] that may be stage number ``stage`` on a device of ``kind``: they fit in memory and leave ops
        for all other stages."""
        problem, stages = self.problem, len(self.problem.speeds)
        legal = problem.need_bytes(stage) <= problem.memory_bytes[self.kinds[kind][0]] * (1 + 1e-9)
        first, end = np.arange(self.size + 1)[:, None], np.arange(self.size + 1)[None, :]
        left = stages - stage - 1
        last = end == self.size if left == 0 else end <= self.size - left
        return legal & (first < end) & last

    def _sweep(self, table: Sequence[np.ndarray], cap: float, maximum: bool) -> Dict[State, np.ndarray]:
        """Best value from (state, first op) to the end: the smallest sum, or (``maximum``) the smallest pace."""
        best = {self.full: np.where(np.arange(self.size + 1) == self.size, 0.0, math.inf)}
        for state, steps in self.steps.items():
            value = np.full(self.size + 1, math.inf)
            for kind, after in steps:
                value = np.minimum(value, self._options(table, cap, maximum, state, kind, best[after]).min(axis=1))
            best[state] = value
        return best

    def _options(self, table: Sequence[np.ndarray], cap: float, maximum: bool, state: State, kind: int,
                 after: np.ndarray) -> np.ndarray:
        """[first op, end op]: the best value of a pipeline with this as its next stage."""
        allowed = self.legal[kind, sum(state)] & (self.pace[kind] <= cap)
        joined = np.maximum(table[kind], after) if maximum else table[kind] + after
        return np.where(allowed, joined, math.inf)

    def smallest_pace(self) -> float:
        """m0: the min-max."""
        return float(self._sweep(self.pace, math.inf, True)[(0,) * len(self.full)][0])

    def paces(self, low: float, high: float) -> np.ndarray:
        """All possible paces of a pipeline within [low, high], sorted."""
        values = np.concatenate([pace[np.isfinite(pace)] for pace in self.pace])
        return np.unique(values[(values >= low) & (values <= high)])

    def solve(self, cap: float) -> Optional[_Solution]:
        """The pipeline with the smallest sum and a pace of at most ``cap``; None if there is none."""
        best = self._sweep(self.cost, cap, False)
        state: State = (0,) * len(self.full)
        if not math.isfinite(best[state][0]):
            return None
        total, pace, cuts, kinds = float(best[state][0]), 0.0, [0], []
        while state != self.full:
            first = cuts[-1]
            value, end, step = min(
                (float(row.min()), int(row.argmin()), step)
                for step in self.steps[state]
                for row in [self._options(self.cost, cap, False, state, step.kind, best[step.after])[first]])
            pace = max(pace, float(self.pace[step.kind][first, end]))
            cuts.append(end)
            kinds.append(step.kind)
            state = step.after
        return _Solution(total, pace, tuple(cuts), tuple(kinds))

    def devices(self, kinds: Sequence[int]) -> Tuple[int, ...]:
        """Devices for stages of these kinds, the lowest number of each kind first."""
        left = [list(members) for members in self.kinds]
        return tuple(left[kind].pop(0) for kind in kinds)
