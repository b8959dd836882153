"""Inter-TaskGraph balance: certified by enumerating all partitions."""
from __future__ import annotations

import itertools
from typing import Any, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.stages import even_stages, whale_stages
from whale_tf.balance import (
    PartitionProblem,
    StagePartition,
    exact_stages,
    partition_fits,
    partition_latency_s,
    partition_memory_bytes,
    stage_times_s,
)
from whale_tf.errors import InfeasibleError, PlanError

size = st.one_of(st.integers(0, 4).map(float), st.floats(0, 4))


@st.composite
def problems(draw: st.DrawFn, ops: int = 7, stages: int = 4) -> PartitionProblem:
    n = draw(st.integers(1, ops))
    count = draw(st.integers(1, min(stages, n)))

    def sizes(length: int) -> Tuple[float, ...]:
        return tuple(draw(size) for _ in range(length))

    return PartitionProblem(
        sizes(n), sizes(n), sizes(n), tuple(value / 4 for value in sizes(n - 1)),
        tuple(draw(st.sampled_from([1.0, 2.0, 1.7])) for _ in range(count)),
        tuple(draw(st.sampled_from([8.0, 20.0, 60.0])) for _ in range(count)),
        draw(st.sampled_from([1, 2, 4, 16])), fixed_order=draw(st.booleans()))


def brute_force(problem: PartitionProblem) -> Optional[float]:
    """The smallest latency over all cuts and device orders; None when nothing fits."""
    n, stages = len(problem.flops), len(problem.speeds)
    orders: Any = [tuple(range(stages))] if problem.fixed_order else list(itertools.permutations(range(stages)))
    answers = [StagePartition("all", (0,) + cuts + (n,), order)
               for cuts in itertools.combinations(range(1, n), stages - 1) for order in orders]
    latencies = [partition_latency_s(problem, answer) for answer in answers if partition_fits(problem, answer)]
    return min(latencies) if latencies else None


@pytest.mark.slow
@given(problems())
def test_exact_equals_brute_force(problem: PartitionProblem) -> None:
    optimum = brute_force(problem)
    if optimum is None:
        with pytest.raises(InfeasibleError):
            exact_stages(problem)
        return
    found = exact_stages(problem)
    assert partition_fits(problem, found)
    assert partition_latency_s(problem, found) == pytest.approx(optimum, rel=1e-9, abs=1e-12)
    heuristic = whale_stages(problem)
    if partition_fits(problem, heuristic):
        assert partition_latency_s(problem, heuristic) >= optimum * (1 - 1e-9)


def uniform(n: int, **changes: Any) -> PartitionProblem:
    values = dict(flops=(1.0,) * n, resident_bytes=(0.0,) * n, activation_bytes=(0.0,) * n, handover_s=(0.0,) * (n - 1),
                  speeds=(1.0, 1.0), memory_bytes=(100.0, 100.0), micro_batches=8)
    return PartitionProblem(**dict(values, **changes))


def test_scores() -> None:
    problem = uniform(4, flops=(1.0, 2.0, 3.0, 6.0), handover_s=(0.0, 5.0, 0.0), resident_bytes=(1.0,) * 4,
                       activation_bytes=(2.0,) * 4, speeds=(1.0, 3.0))
    answer = StagePartition("me", (0, 2, 4), (0, 1))
    assert stage_times_s(problem, answer.cuts, answer.devices) == (3.0, 3.0)
    assert partition_latency_s(problem, answer) == 3 + 5 + 3 + 7 * 5
    assert problem.kept == (2, 1) and partition_memory_bytes(problem, answer.cuts) == (2 + 2 * 4, 2 + 1 * 4)
    assert uniform(4, micro_batches=1).kept == (1, 1)


def test_skip_of_memory_the_heuristic_misses() -> None:
    """Algorithm 1 can end over memory where a partition fits; the exact one finds it."""
    problem = PartitionProblem((2.0, 1.0, 1.0, 2.0), (0.0,) * 4, (1.0, 6.0, 1.0, 1.0), (0.0,) * 3, (1.0, 1.0),
                               (9.0, 4.0), 2)
    assert not partition_fits(problem, even_stages(problem))
    found = exact_stages(problem)
    assert partition_fits(problem, found) and found.devices == (1, 0)


def test_slow_hand_overs_move_the_cut() -> None:
    problem = uniform(4, handover_s=(0.0, 9.0, 0.0))
    assert exact_stages(problem).cuts in ((0, 1, 4), (0, 3, 4))


def test_kept_micro_batches_decide_memory() -> None:
    tight = dict(activation_bytes=(1.0,) * 4, memory_bytes=(4.0, 4.0))
    assert exact_stages(uniform(4, **tight)).cuts == (0, 2, 4)
    with pytest.raises(InfeasibleError, match="no way to cut 4 ops into 2 stages fits"):
        exact_stages(uniform(4, kept=(8, 8), **tight))  # GPipe keeps all


@pytest.mark.parametrize("changes, error, message", [
    ({"speeds": (1.0,) * 5, "memory_bytes": (1.0,) * 5}, InfeasibleError, "5 stages need at least 5 ops, .* has 4"),
    ({"handover_s": (0.0,)}, PlanError, "needs 4 resident and activation sizes and 3 hand-overs, got 4, 4 and 1"),
    ({"memory_bytes": (1.0,)}, PlanError, "2 devices need 2 memory sizes"),
    ({"kept": (1,)}, PlanError, "2 devices need 2 memory sizes .and numbers of kept micro-batches., got 2 .1."),
    ({"micro_batches": 0}, PlanError, "micro-batches must be positive"),
    ({"flops": (1.0, float("inf"), 1.0, 1.0)}, PlanError, "finite"),
    ({"speeds": (), "memory_bytes": ()}, PlanError, "at least one op and one device")])
def test_refusals(changes: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        exact_stages(uniform(4, **changes))


def test_too_many_unlike_devices() -> None:
    speeds = tuple(1.0 + device for device in range(13))
    problem = uniform(20, speeds=speeds, memory_bytes=(99.0,) * 13)
    with pytest.raises(PlanError, match="13 unlike devices have 8192 combinations.*fixed_order=True"):
        exact_stages(problem)
    ordered = uniform(20, speeds=speeds, memory_bytes=(99.0,) * 13, fixed_order=True)
    assert len(exact_stages(ordered).cuts) == 14
