"""Plans from facts: what a micro-batch holds, and sends."""
from __future__ import annotations

from typing import Any, Dict

import pytest

from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.ir.graph import OpGraph
from whale_tf.ir.layout import sharded
from whale_tf.planner.annotated import annotated_plan
from whale_tf.planner.assemble import Crossing, ModelFacts, StageStatistics, TaskGraphSpec

ROOM, SENT = 10 ** 9, 960  # bytes: of a device; from stage to stage, of a mini-batch


@pytest.mark.parametrize("fits", [1, 2])
@pytest.mark.parametrize("config, parts", [({}, 4), ({"io.nested_batch": "divide"}, 8), ({"io.batch": "micro"}, 1)])
def test_micro_batches_in_flight_are_parts_of_a_mini_batch(config: Dict[str, Any], parts: int, fits: int) -> None:
    """Two model replicas of two stages, and four micro-batches, share a mini-batch in part, altogether, or not at all."""
    specs = [TaskGraphSpec(f"t{number}", "replicate", 1) for number in range(2)]
    stage = StageStatistics((), parts * ROOM // fits, 0, 0, ())
    facts = ModelFacts(OpGraph(), specs, [stage] * 2, [Crossing("x:0", 0, 1, sharded(0), SENT)], {})
    plan = annotated_plan(facts, Cluster.parse("cpu:4").limited(ROOM),
                          Config({"num_micro_batch": 4, "pipeline.warmup": "PA", **config}))
    assert [task.warmup for task in plan.task_graphs] == [fits, 1] and plan.bridges[0].bytes == SENT // parts
