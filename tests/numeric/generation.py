"""Hypothesis over several processes: each test takes one part of the examples, with a seed of its own."""
from __future__ import annotations

import random
import sys
from typing import Any, Callable

import hypothesis
import numpy as np
import pytest

from tests.numeric.cases import Case
from tests.numeric.equality import TOLERANCE, Outcome, assert_equal, differences, distance, run_local
from tests.numeric.script import Arrays, Setting

PARTS = 4
EXAMPLES = 8  # beside TensorFlow 2, half of that on Python 3.7, where the profile does not ask for random ones
# one part runs with TensorFlow's graph optimizer
PARAMETERS = [pytest.param(part, marks=[] if part else [pytest.mark.graph_optimizer]) for part in range(PARTS)]


def check_part(part: int, models: Any, check: Callable[[Any], None], few: int = EXAMPLES) -> None:
    """Check one of ``PARTS`` parts of the examples: the profile's 5,000 in `make fuzz`, else always the same ``few``, half as
    many and others on Python 3.7."""
    default = hypothesis.settings.default
    seed, examples = random.SystemRandom().getrandbits(32), default.max_examples
    if default.derandomize:
        is_old = sys.version_info < (3, 8)
        seed, examples = part + PARTS * is_old, min(examples, few // 2 if is_old else few)
    count = -(-examples // PARTS)

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, derandomize=False, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(models)
    def run(model: Any) -> None:
        check(model)

    run()


def compare(outcome: Outcome, case: Case, setting: Setting, model_replicas: int = 1) -> None:
    """``outcome`` equals the local script's.  Some models amplify rounding errors, such as one whose loss falls to -1e13 in three
    steps.  If such a one differs, the tolerance is a hundred times what the local script changes by when its inputs do in the
    last bit, and one that changes by more than 1e-5 shows nothing."""
    expected = run_local(case, setting, model_replicas)
    tolerance = TOLERANCE[setting.dtype]
    if differences(outcome, expected, tolerance):
        moved = case._replace(examples=lambda count, dtype: _moved(case.examples(count, dtype)))
        tolerance = max(tolerance, 100.0 * distance(run_local(moved, setting, model_replicas), expected))
        if tolerance >= 1e-3:
            hypothesis.reject()
    assert_equal(outcome, expected, tolerance)


def _moved(examples: Arrays) -> Arrays:
    """Numbers that differ in the last bit, if at all."""
    random_ = np.random.RandomState(0)
    return {name: value * (1 + np.finfo(value.dtype).eps * random_.randint(-1, 2, value.shape)).astype(value.dtype)
            if value.dtype.kind == "f" else value for name, value in examples.items()}
