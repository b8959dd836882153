"""AMP's exact layer assignment against all assignments, scored by Eq. 5 itself."""
from __future__ import annotations

import itertools
from typing import Tuple

import numpy as np
import pytest

from whale_tf.planner.amp.layer_assignment import assign, evaluate


def best_of_all(times: np.ndarray, edges: np.ndarray, gas: int, count: int, blocking: bool) -> float:
    layers = len(times)
    return min(evaluate(times, edges, gas, (0,) + inner + (layers,), blocking)
               for inner in itertools.combinations(range(1, layers), count - 1))


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("per_stage", [False, True])
def test_equals_the_best_of_all_assignments(blocking: bool, per_stage: bool) -> None:
    random = np.random.RandomState(0)
    for _ in range(500):
        layers, count = random.randint(2, 9), 0
        count = random.randint(1, layers + 1)
        shape: Tuple[int, ...] = (layers, count) if per_stage else (layers,)
        times = random.randint(1, 20, shape).astype(float)
        edges = random.randint(0, 15, (layers - 1, max(count - 1, 0))).astype(float)
        gas = int(random.randint(1, 12))
        found = assign(times, edges, gas, count, blocking)
        assert found is not None
        assert found.cost == pytest.approx(best_of_all(times, edges, gas, count, blocking))
        assert found.cost == pytest.approx(evaluate(times, edges, gas, found.cuts, blocking))


def test_more_stages_than_layers_have_no_assignment() -> None:
    assert assign(np.ones(3), np.zeros((2, 3)), 4, 4) is None
