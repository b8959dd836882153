"""Stages by integer program: against all assignments, bounds, refusals."""
from __future__ import annotations

import itertools
from typing import List, Optional, Sequence

import numpy as np
import pytest

from whale_tf.errors import InfeasibleError, PlanError
from whale_tf.planner.rhino.pipeline import GAP, Flow, StageProblem, bounds, crossing_bytes, most_work, stage_program


def stage_work(problem: StageProblem, of: Sequence[int]) -> List[float]:
    """Work of every stage."""
    found = [0.0] * (max(of) + 1)
    for work, stage in zip(problem.work, of):
        found[stage] += work
    return found


def random_problem(random: np.random.RandomState) -> StageProblem:
    count = random.randint(2, 8)
    work = [float(random.randint(0, 4)) for _ in range(count)]
    flows = []
    for producer in range(count - 1):
        for _ in range(random.randint(0, 3)):
            readers = sorted(set(random.randint(producer + 1, count, random.randint(1, 4)).tolist()))
            flows.append(Flow(producer, tuple(readers), int(random.choice([0, 1, 5, 1000]))))
    return StageProblem(work, flows)


def least_of_all(problem: StageProblem, count: int, epsilon: float) -> Optional[int]:
    """Fewest crossing bytes of all assignments that keep the bounds, the order of edges, the most work, and no stage empty."""
    found: Optional[int] = None
    for of in itertools.product(*[range(first, last + 1) for first, last in bounds(problem, count, epsilon)]):
        ordered = all(of[reader] >= of[flow.producer] for flow in problem.flows for reader in flow.readers)
        if ordered and set(of) == set(range(count)) and max(stage_work(problem, of)) <= most_work(problem, count, epsilon) + 1e-6:
            crossing = crossing_bytes(problem, of)
            found = crossing if found is None else min(found, crossing)
    return found


@pytest.mark.slow
def test_most_balanced_of_all_assignments() -> None:
    random = np.random.RandomState(9)
    for _ in range(200):
        problem, count = random_problem(random), random.randint(2, 4)
        loads = [max(stage_work(problem, of)) for of in itertools.product(*[
            range(first, last + 1) for first, last in bounds(problem, count, 1.0)])
            if set(of) == set(range(count)) and all(of[reader] >= of[flow.producer] for flow in problem.flows
                                                    for reader in flow.readers)]
        if loads and sum(problem.work):
            found = stage_program(problem, count, 1.0, balanced=True)
            assert max(stage_work(problem, found.of)) <= (1 + GAP) * min(loads)
            assert found.bytes == crossing_bytes(problem, found.of)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_equals_the_best_of_all_assignments(seed: int) -> None:
    random = np.random.RandomState(seed)
    refused = 0
    for _ in range(500):
        problem, count, epsilon = random_problem(random), random.randint(2, 5), float(random.choice([0.0, 0.2, 0.5, 1.0, 4.0]))
        least = least_of_all(problem, count, epsilon)
        if least is None:
            refused += 1
            with pytest.raises(InfeasibleError):
                stage_program(problem, count, epsilon)
            continue
        found = stage_program(problem, count, epsilon)
        assert found.bytes == crossing_bytes(problem, found.of) == least and found.is_optimal
        assert all(first <= stage <= last for stage, (first, last) in zip(found.of, bounds(problem, count, epsilon)))
        assert all(found.of[reader] >= found.of[flow.producer] for flow in problem.flows for reader in flow.readers)
        assert set(found.of) == set(range(count))
    assert 0 < refused < 400


def chain(work: List[float], sizes: List[int]) -> StageProblem:
    return StageProblem(work, [Flow(i, (i + 1,), size) for i, size in enumerate(sizes)])


def test_bounds_of_a_chain() -> None:
    problem = chain([1.0] * 8, [1] * 7)
    assert bounds(problem, 4, 0.0) == [(i // 2, i // 2) for i in range(8)]
    assert bounds(problem, 4, 0.5)[1:4] == [(0, 1), (0, 1), (1, 2)]
    assert bounds(problem, 4, 4.0) == [(0, 3)] * 8


def test_tolerance_trades_balance_for_bytes() -> None:
    problem = chain([1.0] * 8, [9, 9, 1, 9, 9, 9, 9])
    assert stage_program(problem, 2, 0.0).of == (0,) * 4 + (1,) * 4
    assert stage_program(problem, 2, 0.25).of == (0,) * 3 + (1,) * 5
    assert stage_program(problem, 2, 0.25).bytes == 1 and stage_program(problem, 2, 0.0).bytes == 9


def test_two_towers_are_cut_where_each_is_narrow() -> None:
    """No linear order of units has this cut between two neighbours of each tower in the other's order."""
    #  0 -> 1 -> 2 -> 3 \
    #                    8
    #  4 -> 5 -> 6 -> 7 /
    flows = [Flow(0, (1,), 9), Flow(1, (2,), 1), Flow(2, (3,), 9), Flow(3, (8,), 9),
             Flow(4, (5,), 9), Flow(5, (6,), 9), Flow(6, (7,), 1), Flow(7, (8,), 9)]
    found = stage_program(StageProblem([1.0] * 9, flows), 2, 0.0)
    assert found.of == (0, 0, 1, 1, 0, 0, 0, 1, 1) and found.bytes == 2


def test_tensor_with_several_readers_crosses_once() -> None:
    problem = StageProblem([1.0] * 4, [Flow(0, (1, 2, 3), 7), Flow(1, (2,), 100), Flow(2, (3,), 100)])
    assert crossing_bytes(problem, (0, 1, 1, 1)) == 7
    assert stage_program(problem, 2, 4.0) == ((0, 1, 1, 1), 7, 7)


def test_long_chain_with_skips_takes_no_time() -> None:
    flows = [Flow(i, (i + 1,) + ((i + 3,) if i + 3 < 400 else ()), 100 + i % 7) for i in range(399)]
    found = stage_program(StageProblem([1.0] * 400, flows), 8, 0.2)
    even = [unit // 50 for unit in range(400)]
    assert found.is_optimal and found.bytes < crossing_bytes(StageProblem([1.0] * 400, flows), even)


@pytest.mark.parametrize("epsilon,flows,error,match", [
    (-0.1, [], PlanError, "-0.1, expected at least 0"),
    (0.1, [Flow(2, (1,), 3)], PlanError, "unit 1 reads a result of unit 2"),
    (0.0, [Flow(0, (1,), 1), Flow(1, (2,), 1)], InfeasibleError, "3 units cannot be divided into 4 stages"),
])
def test_refusals(epsilon: float, flows: List[Flow], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        stage_program(StageProblem([1.0, 1.0, 1.0], flows), 4, epsilon)
