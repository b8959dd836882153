"""Optimizers that apply gradients in a condition, which does not hold in every step, as with a dynamic loss scale."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

import whale_tf as wh
from whale_tf._tf_compat import v1 as tf
from whale_tf.errors import ConfigError

RNG = np.random.RandomState(0)
BATCHES = [(RNG.randn(8, 6), RNG.randn(8, 4)) for _ in range(4)]
BATCHES[2][0][0, 0] = np.nan  # this step updates nothing
WEIGHTS = RNG.randn(6, 5), RNG.randn(5, 4)


@pytest.fixture(params=["version 1", "functions"])
def control_flow(request: Any) -> Iterator[str]:
    before = tf.control_flow_v2_enabled()
    (tf.disable_control_flow_v2 if request.param == "version 1" else tf.enable_control_flow_v2)()
    yield request.param
    (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()


def trained(*counts: int, use_resource: bool = True) -> List[Any]:
    """Losses, and variables, slots and counters at the end."""
    with tf.Graph().as_default():
        x, y = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.float64, [None, 4])
        h, weights = x, []
        with contextlib.ExitStack() as scopes:
            for number, value in enumerate(WEIGHTS):
                if number < len(counts):
                    scopes.close()
                    scopes.enter_context(wh.replicate(counts[number]))
                weights.append(tf.get_variable(f"w{number}", initializer=value, use_resource=use_resource))
                h = tf.matmul(tf.tanh(h), weights[-1])
            loss = tf.reduce_mean(tf.square(h - y))
        optimizer = tf.train.AdamOptimizer(0.05)
        gradients = optimizer.compute_gradients(loss, weights)
        is_finite = tf.reduce_all([tf.reduce_all(tf.is_finite(gradient)) for gradient, _ in gradients])
        step = tf.get_variable("step", initializer=np.int64(0), trainable=False, use_resource=use_resource)
        train = tf.cond(is_finite, lambda: tf.group(optimizer.apply_gradients(gradients, step)), tf.no_op)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [session.run([train, loss], {x: rows, y: labels})[1] for rows, labels in BATCHES]
            return losses + session.run(tf.global_variables())


@pytest.mark.parametrize("counts, config, use_resource", [
    ((3,), {"variables": "shared"}, True), ((3,), {"variables": "mirrored"}, True), ((3,), {"variables": "mirrored"}, False),
    ((1, 2), {"num_micro_batch": 2}, True), ((2, 1), {"variables": "mirrored"}, True)], ids=str)
def test_equals_local(control_flow: str, counts: Any, config: Dict[str, Any], use_resource: bool) -> None:
    if control_flow == "functions" and not use_resource:
        pytest.skip("functions cannot take reference variables")
    local = trained(use_resource=use_resource)
    wh.init(config, cluster="cpu:3")
    try:
        if control_flow == "functions" and "mirrored" in config.values():
            message = "variables is 'mirrored', .* a condition, function or chain of writes updates 'w0'"
            with pytest.raises(ConfigError, match=message):
                trained(*counts)
            return
        for one, other in zip(trained(*counts, use_resource=use_resource), local):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    finally:
        wh.shutdown()
