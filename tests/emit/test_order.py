"""The schedule's control edges leave TensorFlow's graph optimizer what it fuses."""
from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import whale_tf as wh
from whale_tf._tf_compat import v1

pytestmark = pytest.mark.graph_optimizer
MICRO_BATCHES = 4
APART = {"Conv2D", "BiasAdd", "Relu", "_MklNativeConv2D"}  # what a convolution is made of that was not fused


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    wh.shutdown()


def layer(x: Any, channels: int, name: str) -> Any:
    kernel = v1.get_variable(name + "/kernel", [3, 3, int(x.shape[3]), channels])
    return v1.nn.relu(v1.nn.bias_add(v1.nn.conv2d(x, kernel, 1, "SAME"), v1.get_variable(name + "/bias", [channels])))


@pytest.mark.parametrize("schedule", ["backward_first", "gpipe", "zero_bubble_h1"])
def test_convolutions_at_the_ends_of_steps_are_fused(schedule: str) -> None:
    wh.init({"num_micro_batch": MICRO_BATCHES, "pipeline.schedule": schedule}, cluster="cpu:2")
    with v1.Graph().as_default():
        v1.get_variable_scope().set_use_resource(True)
        h = x = v1.placeholder(v1.float32, [2 * MICRO_BATCHES, 8, 8, 3])
        for stage in range(2):
            with wh.replicate(1):
                h = layer(h, 4, f"stage{stage}")
        loss = v1.reduce_mean(h)
        update = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            options, metadata = v1.RunOptions(output_partition_graphs=True), v1.RunMetadata()
            session.run([loss, update], {x: np.ones(x.shape)}, options, metadata)
    types = Counter(node.op for graph in metadata.partition_graphs for node in graph.node)
    assert not APART & set(types)
    assert sum(count for name, count in types.items() if "FusedConv2D" in name) == 2 * MICRO_BATCHES
