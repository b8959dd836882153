"""Whale's heuristic and its baseline beside the exact solver: every solver on every case."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.stages import STAGE_SOLVERS, cut_by_weight, even_stages, whale_stages
from tests.balance.test_stages import problems, uniform
from whale_tf.balance import PartitionProblem, exact_stages, partition_fits
from whale_tf.errors import InfeasibleError


@pytest.mark.slow
@given(problems(ops=20, stages=6), st.sampled_from(sorted(STAGE_SOLVERS)))
def test_every_answer_is_a_partition(problem: PartitionProblem, name: str) -> None:
    try:
        found = STAGE_SOLVERS[name](problem)
    except InfeasibleError:
        assert name == "exact"
        return
    assert found.cuts[0] == 0 and found.cuts[-1] == len(problem.flops) and found.algorithm == name
    assert all(first < end for first, end in zip(found.cuts, found.cuts[1:]))
    assert sorted(found.devices) == list(range(len(problem.speeds)))
    if problem.fixed_order:
        assert found.devices == tuple(range(len(problem.speeds)))


def test_more_memory_comes_first() -> None:
    """Whale Fig. 8: V100 (32 GB) before P100 (16 GB), and ops in proportion to speed."""
    problem = uniform(25, speeds=(9.3, 15.7), memory_bytes=(16.0, 32.0))
    found = whale_stages(problem)
    assert found.devices == (1, 0) and found.cuts == (0, 16, 25)
    assert even_stages(problem).cuts == (0, 12, 25)


def test_overflow_is_shifted_to_the_stage_with_the_least_work() -> None:
    problem = uniform(12, speeds=(1.0, 1.0, 1.0), memory_bytes=(8.0, 8.0, 8.0), activation_bytes=(1.0,) * 12)
    assert cut_by_weight(problem.flops, problem.speeds) == (0, 4, 8, 12)  # the first stage keeps 3 x 4 > 8
    found = whale_stages(problem)
    assert found.cuts == (0, 2, 6, 12) and partition_fits(problem, found)
    assert exact_stages(problem).cuts == (0, 2, 6, 12)
