"""AMP's exact layer assignment against all assignments, scored by Eq. 5 itself."""
from __future__ import annotations

import itertools
from typing import Tuple

import numpy as np
import pytest

from whale_tf.planner.amp.layer_assignment import assign, evaluate


def best_of_all(times: np.ndarray, edges: np.ndarray, gas: int, count: int) -> float:
    layers = len(times)
    return min(evaluate(times, edges, gas, (0,) + inner + (layers,))
               for inner in itertools.combinations(range(1, layers), count - 1))


@pytest.mark.slow
@pytest.mark.parametrize("per_stage", [False, True])
def test_equals_the_best_of_all_assignments(per_stage: bool) -> None:
    random = np.random.RandomState(0)
    for _ in range(500):
        layers, count = random.randint(2, 9), 0
        count = random.randint(1, layers + 1)
        shape: Tuple[int, ...] = (layers, count) if per_stage else (layers,)
        times = random.randint(1, 20, shape).astype(float)
        edges = random.randint(0, 15, (layers - 1, max(count - 1, 0))).astype(float)
        gas = int(random.randint(1, 12))
        found = assign(times, edges, gas, count)
        assert found is not None
        assert found.cost == pytest.approx(best_of_all(times, edges, gas, count))
        assert found.cost == pytest.approx(evaluate(times, edges, gas, found.cuts))


def test_more_stages_than_layers_have_no_assignment() -> None:
    assert assign(np.ones(3), np.zeros((2, 3)), 4, 4) is None


def test_memory_limits_which_stages_are_looked_at() -> None:
    """Against all assignments whose stages fit, of layers of random sizes."""
    random = np.random.RandomState(1)
    none = 0
    for _ in range(150):
        layers = random.randint(2, 8)
        count = random.randint(1, layers + 1)
        times = random.randint(1, 20, (layers, count)).astype(float)
        edges = random.randint(0, 15, (layers - 1, max(count - 1, 0))).astype(float)
        sizes, limits, gas = random.randint(1, 9, layers), random.randint(4, 20, count), int(random.randint(1, 9))
        lowest = [[min(first for first in range(end + 1) if sizes[first:end].sum() <= limit) for end in range(layers + 1)]
                  for limit in limits]
        legal = [evaluate(times, edges, gas, cuts)
                 for inner in itertools.combinations(range(1, layers), count - 1) for cuts in [(0,) + inner + (layers,)]
                 if all(sizes[a:b].sum() <= limit for a, b, limit in zip(cuts, cuts[1:], limits))]
        found = assign(times, edges, gas, count, lowest)
        none += found is None
        assert (found is None) == (not legal) and (found is None or found.cost == pytest.approx(min(legal)))
    assert 0 < none < 150
