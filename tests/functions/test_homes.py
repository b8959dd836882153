"""``zero`` and ``offload`` in tf.functions and ``fit``: the local numbers, with every variable at home."""
from __future__ import annotations

from typing import Any

import pytest

from tests.functions.equality import Way, batches, check
from tests.functions.test_training_steps import keras_adam, momentum, sparse

LEVELS = [{"zero": "v1"}, {"zero": "v2"}, {"zero": "v3"}, {"offload": "states"}, {"offload": "v0"}]
BUILDS = {"momentum": momentum, "keras_adam": keras_adam, "sparse": sparse}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("way", [
    Way((), 2, {}), Way((), 4, {"num_micro_batch": 2, "recompute": "full"}), Way((1, 1), 4, {"num_micro_batch": 2}),
    Way((1, 2), 3, {"num_micro_batch": 2, "emit": "call"})], ids=str)
@pytest.mark.parametrize("build", BUILDS)
def test_steps(build: str, way: Way, level: Any) -> None:
    outcome = check(BUILDS[build], way._replace(config={**way.config, **level}), batches((16, 16, 12, 16, 16)))
    assert outcome.plan is not None and any(task.homes for task in outcome.plan.task_graphs)
