"""Hypothesis over several processes: each test takes one part of the examples, with a seed of its own."""
from __future__ import annotations

import random
from typing import Any, Callable

import hypothesis

PARTS = 4


def check_part(part: int, models: Any, check: Callable[[Any], None]) -> None:
    """Check one of ``PARTS`` parts of the profile's examples (200, or 5,000 in `make fuzz`)."""
    default = hypothesis.settings.default
    seed = part if default.derandomize else random.SystemRandom().getrandbits(32)
    count = -(-default.max_examples // PARTS)

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, derandomize=False, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(models)
    def run(model: Any) -> None:
        check(model)

    run()
