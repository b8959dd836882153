"""Hypothesis over several processes: each test takes one part of the examples, with a seed of its own."""
from __future__ import annotations

import random
import sys
from typing import Any, Callable

import hypothesis
import pytest

PARTS = 4
EXAMPLES = 16  # beside TensorFlow 2, half of that on Python 3.7, where the profile does not ask for random ones
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
