"""What AMP is compared with: Megatron's heuristics, random strategies, placements by annealing."""
from __future__ import annotations

import itertools
import random
from typing import List, Tuple

import numpy
import pytest

from benchmarks.papers import amp as papers
from benchmarks.papers import amp_annealing as annealing
from benchmarks.papers.amp import balanced, uniform
from tests.planner.results import check, profile
from whale_tf.cluster import Cluster
from whale_tf.planner.amp.cost import AmpCosts
from whale_tf.planner.amp.placement import megatron
from whale_tf.planner.amp.search import Estimated, search
from whale_tf.profiler.model_profile import load_builtin


@pytest.fixture(scope="module")
def gpt() -> AmpCosts:
    return AmpCosts(load_builtin("gpt2-24"), Cluster.parse("amp-het"), 32)


@pytest.mark.parametrize("name", sorted(papers.SEARCHES))
def test_every_search_makes_plans(name: str) -> None:
    costs = AmpCosts(profile(), Cluster.parse("dapple-b:4"), 16)
    check(papers.SEARCHES[name](costs)[0].candidate(name, costs), name)


def test_search_is_no_worse_than_any_baseline(gpt: AmpCosts) -> None:
    found = search(gpt)
    assert all(a.estimate.seconds <= b.estimate.seconds for a, b in zip(found, found[1:]) if a.estimate.fits == b.estimate.fits)
    best = found[0].estimate.seconds
    others: List[List[Estimated]] = [papers.megatron(gpt), papers.megatron(gpt, "parameters")]
    for other in others:
        assert best <= other[0].estimate.seconds
    for candidate in found + others[0]:
        cuts = candidate.strategy.cuts
        assert cuts[0] == 0 and cuts[-1] == 30 and all(a < b for a, b in zip(cuts, cuts[1:]))
        assert gpt.estimate(candidate.strategy) == candidate.estimate


def test_megatron_takes_the_smallest_product(gpt: AmpCosts) -> None:
    """Section 6.5.2: for micro-batch 1 it picks dp 16, the model fitting one device."""
    chosen = [c for c in papers.megatron(gpt) if c.strategy.micro_batch == 1 and c.estimate.fits]
    assert [tuple(c.strategy.degrees) for c in chosen] == [(1, 16, 1)]


@pytest.mark.parametrize("seed", range(5))
def test_random_strategies_are_legal_and_repeatable(gpt: AmpCosts, seed: int) -> None:
    found = papers.random_search(gpt, 10, seed)
    assert [c.estimate for c in found] == [c.estimate for c in papers.random_search(gpt, 10, seed)]
    assert all(sorted(c.strategy.placement.ravel().tolist()) == list(range(16)) for c in found)


@pytest.mark.parametrize("rows,columns,dp,tmp", [(4, 4, 2, 2), (4, 4, 1, 2), (4, 4, 4, 1), (2, 6, 3, 2), (3, 3, 1, 1)])
def test_tilings_cover_the_mesh_once(rows: int, columns: int, dp: int, tmp: int) -> None:
    for seed in range(20):
        tiles = annealing.tile(rows, columns, dp, tmp, random.Random(seed))
        assert tiles is not None
        covered = numpy.zeros((rows, columns), dtype=int)
        for row, column, height, width in tiles:
            assert {height, width} == {dp, tmp}
            covered[row:row + height, column:column + width] += 1
        assert (covered == 1).all()


def test_no_tiling() -> None:
    assert annealing.tile(3, 3, 2, 1, random.Random(0)) is None


@pytest.mark.slow
def test_annealing(gpt: AmpCosts) -> None:
    found = annealing.anneal(gpt, iterations=60, seed=1)
    assert [c.estimate for c in found] == [c.estimate for c in annealing.anneal(gpt, iterations=60, seed=1)]
    for candidate in found:
        degree, placement = candidate.strategy.degrees, candidate.strategy.placement
        assert placement.shape == (degree.pp, degree.dp, degree.tmp)
        assert sorted(placement.ravel().tolist()) == list(range(16))
    assert any((c.strategy.placement != megatron(gpt.cluster, c.strategy.degrees)).any() for c in found)


def test_balanced_makes_the_heaviest_stage_lightest() -> None:
    generator = numpy.random.RandomState(1)
    for _ in range(200):
        weights = generator.randint(1, 30, generator.randint(2, 9)).tolist()
        count = generator.randint(1, len(weights) + 1)

        def heaviest(cuts: Tuple[int, ...]) -> int:
            return max(sum(weights[a:b]) for a, b in zip(cuts, cuts[1:]))

        best = min(heaviest((0,) + inner + (len(weights),))
                   for inner in itertools.combinations(range(1, len(weights)), count - 1))
        assert heaviest(balanced(weights, count)) == best


def test_uniform_is_megatrons() -> None:
    assert uniform(10, 4) == (0, 2, 5, 7, 10)
