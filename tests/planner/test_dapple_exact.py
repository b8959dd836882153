"""DAPPLE's exact planner against all plans (the other solvers: tests/papers/test_dapple.py)."""
from __future__ import annotations

from typing import Optional

import pytest

from tests.planner.dapple_cases import all_plans, case, score
from whale_tf.cluster import Cluster
from whale_tf.planner.dapple import exact
from whale_tf.planner.dapple.cost import Stages
from whale_tf.planner.dapple.device_sets import Servers

CLOSE = 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(block, marks=[pytest.mark.full] if block >= 3 else []) for block in range(6)])
def test_exact_is_the_best_of_all_plans(block: int) -> None:
    """3,000 cases, half of them only with --full: same latency as brute force, by a scorer that shares no code with the
    planner."""
    for seed in range(500 * block, 500 * (block + 1)):
        problem = case(seed, max_devices=4)
        costs = problem.costs()
        plans = [(score(problem, plan), plan) for plan in all_plans(costs)]
        best = min(seconds for seconds, _ in plans)
        found = exact.solve(costs)
        if found is None:
            assert best == float("inf"), seed
        else:
            assert score(problem, found) == pytest.approx(best, rel=CLOSE), seed


def test_bound_is_respected() -> None:
    costs = case(3).costs()
    best = exact.solve(costs)
    assert best is not None
    seconds = costs.latency(best)
    assert exact.solve(costs, bound=seconds) is None
    assert exact.solve(costs, bound=seconds * 1.0001) is not None


@pytest.mark.slow
def test_bounds_enclose() -> None:
    for seed in range(40):
        costs = case(seed).costs()
        best = exact.solve(costs)
        if best is not None:
            assert exact.Floors(costs).least_seconds * (1 - CLOSE) <= costs.latency(best) <= exact.upper_bound(costs)


def test_round_sets_on_large_clusters_are_legal() -> None:
    servers = Servers(Cluster.parse("dapple-a:64"))
    used = (8, 8, 8, 4, 0, 0, 0, 0)
    sets = list(servers.round_sets(used))
    assert servers.free(used) in sets
    assert all(0 <= taken <= free for row in sets for taken, free in zip(row, servers.free(used)))


@pytest.mark.slow
def test_stages_that_a_faster_plan_makes_needless_are_left_out() -> None:
    """The work of a plan takes less than its latency, so a limit of that keeps it; none is below the least work."""
    for seed in range(60):
        costs = case(seed).costs()
        best = exact.solve(costs)
        if best is None:
            continue

        def below(seconds: float) -> Optional[Stages]:
            return exact.solve(case(seed).costs(below_s=seconds))

        kept = below(costs.latency(best) * (1 + CLOSE))
        assert kept is not None and costs.latency(kept) == pytest.approx(costs.latency(best), rel=CLOSE), seed
        assert below(exact.Floors(costs).least_seconds * (1 - CLOSE)) is None, seed
