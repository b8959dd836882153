"""Assigns layers to pipeline stages (AMP section 3.5), exactly.

Problem.  Layers 0..L-1, k stages, ``times[l][j]`` seconds of layer l on stage j (forward and backward, one micro-batch),
``edges[c][j]`` seconds of the tensors crossing from stage j to j + 1 if the cut is after layer c, ``gas`` micro-batches.
Choose ``0 = b_0 < b_1 < ... < b_k = L`` to minimise Eq. 5::

    (gas - 1) max_j t_j + sum_j e_j + sum_j t_j        t_j = sum of times[l][j] for b_j <= l < b_{j+1}

Method.  The paper's dynamic programming carries the maximum as a table dimension, O(k L^4).  Here the maximum is a cap m: the
least sum under a cap is a shortest path over layers, O(k L) with a sliding-window minimum (window: the layers that fit under m).
Caps are the possible stage times, sorted; the least sum falls as the cap rises, so an interval of caps (low, high) has the bound
``(gas - 1) M[low + 1] + sum under M[high]``, and branch and bound halves the interval with the least bound until none is below
the best assignment.  Measured: a handful of probes.
"""
from __future__ import annotations

import heapq
from typing import Dict, Hashable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy

INFINITY = float("inf")
KEPT = 10_000  # answers; a search asks again under other memory measures
_KNOWN: Dict[Hashable, Optional[Assignment]] = {}


class Assignment(NamedTuple):
    """The ``cost`` of Eq. 5 in seconds.  Stage j holds layers ``cuts[j]`` to ``cuts[j + 1] - 1``."""

    cost: float
    cuts: Tuple[int, ...]


def evaluate(times: numpy.ndarray, edges: numpy.ndarray, gas: int, cuts: Sequence[int], blocking: bool = False) -> float:
    """Eq. 5 of an assignment, from its terms.

    Args:
        times: ``[L]`` (alike on all stages) or ``[L, k]``.
        edges: ``[L - 1, k - 1]``.
        blocking: a stage also waits for its messages, so the maximum is over ``t_j + e_{j-1} + e_j``.
    """
    count = len(cuts) - 1
    stage = [float(numpy.sum(times[a:b] if times.ndim == 1 else times[a:b, j]))
             for j, (a, b) in enumerate(zip(cuts, cuts[1:]))]
    edge = [float(edges[cuts[j + 1] - 1, j]) for j in range(count - 1)]
    around = [0.0] + edge + [0.0]
    cycle = max(t + (around[j] + around[j + 1] if blocking else 0.0) for j, t in enumerate(stage))
    return (gas - 1) * cycle + sum(edge) + sum(stage)


def assign(times: numpy.ndarray, edges: numpy.ndarray, gas: int, count: int,
           lowest: Optional[Sequence[Sequence[int]]] = None) -> Optional[Assignment]:
    """The assignment of least cost to ``count`` non-empty stages, or None if there is none.

    Args:
        lowest: ``[k][L + 1]``: for every stage and end the first layer with which the stage fits into memory (the end itself if
            none does), rising with the end; None means that all fit.
    """
    key = (times.shape, times.tobytes(), edges.tobytes(), gas, count, None if lowest is None else tuple(map(tuple, lowest)))
    if key not in _KNOWN:
        if len(_KNOWN) >= KEPT:
            _KNOWN.clear()
        _KNOWN[key] = _assigned(times, edges, gas, count, lowest)
    return _KNOWN[key]


def _assigned(times: numpy.ndarray, edges: numpy.ndarray, gas: int, count: int,
              lowest: Optional[Sequence[Sequence[int]]]) -> Optional[Assignment]:
    layers = len(times)
    if count > layers or count < 1:
        return None
    if count == 1:
        if lowest is not None and lowest[0][layers] > 0:
            return None
        return Assignment(evaluate(times, edges, gas, (0, layers)), (0, layers))
    problem = AssignmentProblem(times, edges, count, lowest)
    if lowest is not None and problem.probe(INFINITY)[0] == INFINITY:
        return None
    cuts = problem.trace(problem.probe(INFINITY)[1]) if gas == 1 else _branch_and_bound(problem, gas)
    return Assignment(evaluate(times, edges, gas, cuts), cuts)


def _branch_and_bound(problem: AssignmentProblem, gas: int) -> Tuple[int, ...]:
    caps = problem.caps()
    best: Tuple[float, Tuple[int, ...]] = (INFINITY, ())
    sums: Dict[int, float] = {}

    def probe(index: int) -> float:
        nonlocal best
        if index not in sums:
            sums[index], back = problem.probe(caps[index])
            if sums[index] < INFINITY:
                cuts = problem.trace(back)
                best = min(best, ((gas - 1) * problem.longest(cuts) + sums[index], cuts))
        return sums[index]

    low, high = problem.first_feasible(caps), len(caps) - 1
    least, most = probe(low), probe(high)
    heap = [((gas - 1) * caps[low + 1] + most, low, high)] if low < high and least > most else []
    while heap:
        bound, low, high = heapq.heappop(heap)
        if bound >= best[0] or high - low <= 1:
            continue
        middle = (low + high) // 2
        probe(middle)
        for a, b in ((low, middle), (middle, high)):
            if b - a > 1 and sums[a] > sums[b]:
                heapq.heappush(heap, ((gas - 1) * caps[a + 1] + sums[b], a, b))
    return best[1]


_Back = List[List[int]]


class AssignmentProblem:
    """Probes of one problem: the least sum of times and edges with no stage above a cap."""

    def __init__(self, times: numpy.ndarray, edges: numpy.ndarray, count: int,
                 lowest: Optional[Sequence[Sequence[int]]] = None) -> None:
        self.layers, self.count, self.lowest = len(times), count, lowest
        self.edges: List[List[float]] = edges.T.tolist()
        if times.ndim == 1:
            self.distinct = [[0.0] + numpy.cumsum(times).tolist()]
            self.sums = self.distinct * count
        else:
            prefixes: Dict[bytes, List[float]] = {}
            self.sums = [prefixes.setdefault(column.tobytes(), [0.0] + numpy.cumsum(column).tolist())
                         for column in numpy.ascontiguousarray(times.T)]
            self.distinct = list(prefixes.values())

    def caps(self) -> List[float]:
        """All possible times of a stage, rising."""
        upper = numpy.triu_indices(self.layers + 1, 1)
        values = [(sums[None, :] - sums[:, None])[upper] for sums in map(numpy.asarray, self.distinct)]
        result: List[float] = numpy.unique(values[0] if len(values) == 1 else numpy.concatenate(values)).tolist()
        return result

    def first_feasible(self, caps: List[float]) -> int:
        """Index of the smallest cap under which all layers fit."""
        low, high = 0, len(caps) - 1
        while low < high:
            middle = (low + high) // 2
            if self._fits(caps[middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _fits(self, cap: float) -> bool:
        """Whether all layers fit under a cap.  If the stages are alike, each in turn takes as many layers as fit, leaving one for
        each later stage.  Otherwise a stage may have to leave a layer to a faster one, and only a probe tells."""
        if len(self.distinct) > 1 or self.lowest is not None:
            return self.probe(cap)[0] < INFINITY
        at, sums = 0, self.distinct[0]
        for j in range(self.count):
            start, last = at, self.layers - (self.count - 1 - j)
            while at < last and sums[at + 1] - sums[start] <= cap:
                at += 1
            if at == start:
                return False
        return at == self.layers

    def longest(self, cuts: Sequence[int]) -> float:
        """max_j of Eq. 5."""
        return max(sums[b] - sums[a] for sums, a, b in zip(self.sums, cuts, cuts[1:]))

    def probe(self, cap: float) -> Tuple[float, _Back]:
        """(least sum, start of the stage for every stage and end); infinity if nothing fits under the cap."""
        layers, count = self.layers, self.count
        lows: Dict[int, List[int]] = {}
        for sums in self.sums:
            if id(sums) not in lows:
                lows[id(sums)] = _window(sums, cap)
        first, low = self.sums[0], self._low(0, lows)
        cost = [INFINITY] + [first[i] if low[i] == 0 else INFINITY for i in range(1, layers + 1)]
        back: _Back = [[0] * (layers + 1)]
        for j in range(1, count):
            sums, low, edge = self.sums[j], self._low(j, lows), self.edges[j - 1]
            following, starts = [INFINITY] * (layers + 1), [0] * (layers + 1)
            queue: List[int] = []  # starts of the stage, their values rising
            values: List[float] = []
            head = 0
            for end in range(j + 1, layers - (count - 1 - j) + 1):
                start = end - 1
                value = cost[start] + edge[start - 1] - sums[start]
                while len(queue) > head and values[-1] >= value:
                    queue.pop()
                    values.pop()
                queue.append(start)
                values.append(value)
                while head < len(queue) and queue[head] < low[end]:
                    head += 1
                if head < len(queue):
                    following[end] = values[head] + sums[end]
                    starts[end] = queue[head]
            cost = following
            back.append(starts)
        return cost[layers], back

    def _low(self, stage: int, lows: Mapping[int, List[int]]) -> List[int]:
        """For every end the first start of a stage that stays under the cap and fits into memory."""
        low = lows[id(self.sums[stage])]
        return low if self.lowest is None else [max(pair) for pair in zip(low, self.lowest[stage])]

    def trace(self, back: _Back) -> Tuple[int, ...]:
        cuts = [self.layers]
        for starts in reversed(back[1:]):
            cuts.append(starts[cuts[-1]])
        return tuple(reversed(cuts + [0]))


def _window(sums: List[float], cap: float) -> List[int]:
    """For every end the first start of a stage that stays under the cap (the end itself: none does)."""
    result, start = [0] * len(sums), 0
    for end in range(1, len(sums)):
        while sums[end] - sums[start] > cap:
            start += 1
        result[end] = start
    return result
