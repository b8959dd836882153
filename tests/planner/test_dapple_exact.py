"""Every DAPPLE solver on every case; the exact one against all plans."""
from __future__ import annotations

import pytest

from tests.planner.dapple_cases import all_plans, case, score
from whale_tf.cluster import Cluster
from whale_tf.planner.dapple import baselines, exact
from whale_tf.planner.dapple.cost import Costs
from whale_tf.planner.dapple.device_sets import Servers
from whale_tf.planner.dapple.search import SOLVERS
from whale_tf.profiler.model_profile import load_builtin

CLOSE = 1e-9
# the exact planners choose among all plans, or among all of their kind
KINDS = {"exact": lambda plan: True, "two-stages": lambda plan: len(plan) == 2,
         "straight": lambda plan: all(stage.replicas == 1 for stage in plan), "data-parallel": lambda plan: len(plan) == 1}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
def test_exact_is_the_best_of_all_plans(block: int) -> None:
    """3,000 cases: same latency as brute force, by a scorer that shares no code with the planner."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_every_solver(name: str) -> None:
    """A legal plan that fits, whose latency the planner and the independent scorer agree on, never below the exact one's; a
    solver exact within its kind finds the best of it."""
    for seed in range(150):
        problem = case(10000 + seed, max_devices=4)
        costs = problem.costs()
        found = SOLVERS[name](costs)
        everything = [plan for plan in all_plans(costs) if KINDS.get(name, KINDS["exact"])(plan)]
        least = min([score(problem, plan) for plan in everything] or [float("inf")])
        if found is None:
            assert name not in KINDS or least == float("inf"), (name, seed)
            continue
        assert [stage.first for stage in found] == [0] + [stage.end for stage in found[:-1]]
        assert found[-1].end == costs.num_layers and costs.fits(found)
        used = costs.servers.none()
        for stage in found:
            assert stage.used == used
            used = tuple(a + b for a, b in zip(used, stage.taken))
        assert used == costs.servers.sizes
        seconds = score(problem, found)
        assert costs.latency(found) == pytest.approx(seconds, rel=CLOSE), (name, seed)
        assert seconds >= least * (1 - CLOSE), (name, seed)
        if name in KINDS:
            assert seconds == pytest.approx(least, rel=CLOSE), (name, seed)


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
            assert exact.lower_bound(costs) * (1 - CLOSE) <= costs.latency(best) <= exact.upper_bound(costs)


@pytest.mark.slow
@pytest.mark.parametrize("model,cluster,batch,micro_batches", [
    ("bert-large@dapple", "dapple-a", 128, 8), ("vgg-19@dapple", "dapple-c", 2048, 4), ("gnmt-16", "dapple-a", 1024, 2)])
def test_exact_is_no_worse_than_the_others_on_real_models(model: str, cluster: str, batch: int, micro_batches: int) -> None:
    costs = Costs(load_builtin(model), Servers(Cluster.parse(cluster)), batch, micro_batches)
    best = exact.solve(costs)
    assert best is not None
    for name in ("two-stages", "data-parallel", "pipedream", "torchgpipe", "even"):
        other = SOLVERS[name](costs)
        if other is not None:
            assert costs.latency(best) <= costs.latency(other) * (1 + CLOSE), name


def test_round_sets_on_large_clusters_are_legal() -> None:
    servers = Servers(Cluster.parse("dapple-a:64"))
    used = (8, 8, 8, 4, 0, 0, 0, 0)
    sets = list(servers.round_sets(used))
    assert servers.free(used) in sets
    assert all(0 <= taken <= free for row in sets for taken, free in zip(row, servers.free(used)))


@pytest.mark.parametrize("times,count", [([1.0] * 10, 3), ([5, 1, 1, 1, 1, 1], 3), ([3, 1, 4, 1, 5, 9, 2, 6], 4), ([1, 2, 3], 3)])
def test_block_partition(times: list, count: int) -> None:
    """Barany and Grinberg 2015: the sums of the blocks differ by no more than the largest element."""
    cuts = baselines.balanced_cuts(times, count)
    blocks = [sum(times[a:b]) for a, b in zip(cuts, cuts[1:])]
    assert cuts[0] == 0 and cuts[-1] == len(times) and all(a < b for a, b in zip(cuts, cuts[1:]))
    assert max(blocks) - min(blocks) <= max(times)
