"""What a script no longer has is freed, with its variables; only the graph that was rewritten last remains."""
from __future__ import annotations

import gc
import weakref
from typing import Any, Dict

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh

v1 = tf.compat.v1


def function() -> Any:
    weights = [tf.Variable(np.ones([4, 2])), tf.Variable(np.ones([2, 1]))]
    slots = [tf.Variable(np.zeros_like(one)) for one in weights]

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights[0] @ weights[1] - 1.0))
        for weight, slot, gradient in zip(weights, slots, tape.gradient(loss, weights)):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)

    x = tf.constant(np.ones([4, 4]))
    step(x)
    return weakref.ref(step.get_concrete_function(x).graph)


def session() -> Any:
    with tf.Graph().as_default() as graph, v1.Session() as one:
        w = v1.get_variable("w", [4, 1], tf.float64)
        update = v1.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(tf.square(tf.matmul(tf.constant(np.ones([4, 4])), w))))
        one.run(v1.global_variables_initializer())
        one.run(update)
    return weakref.ref(graph)


@pytest.mark.parametrize("config", [{}, {"zero": "v1"}, {"verify": "first_step"}], ids=str)
@pytest.mark.parametrize("make", [function, session])
def test_graphs_that_are_gone(make: Any, config: Dict[str, Any]) -> None:
    if make is function and tf.__version__.startswith("1."):
        pytest.skip("TensorFlow 1.15 has no functions that can be divided")
    wh.init(config, cluster="cpu:2")
    try:
        gone, latest = make(), make()
        gc.collect()
        assert gone() is None and latest() is not None and wh.current_plan() is not None
    finally:
        wh.shutdown()
