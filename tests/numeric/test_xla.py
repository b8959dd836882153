"""Bodies that XLA compiles: the local numbers, and what is left out or refused."""
from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.test_mixed_precision import one_device, train
from tests.numeric.trace import traced

IS_OLD = tf.__version__.startswith("1.")
compiled = pytest.mark.skipif(IS_OLD, reason="TensorFlow 1.15 compiles no calls")


def small(host: bool) -> List[Any]:
    """Two layers of two TaskGraphs, in the first a Python function if ``host``."""
    x = tf.placeholder(tf.float32, [8, 4], name="x")
    with wh.replicate(1):
        h = tf.matmul(x, tf.get_variable("w", initializer=np.eye(4, dtype=np.float32), use_resource=True))
        if host:
            more = wh.batch_axis(tf.py_func(np.zeros_like, [h], tf.float32, name="python"), 0)
            more.set_shape(h.shape)
            h += tf.stop_gradient(more)
    with wh.replicate(1):
        h = tf.matmul(h, tf.get_variable("v", initializer=np.eye(4, dtype=np.float32), use_resource=True))
        loss = tf.reduce_sum(tf.square(h))
    return [loss, tf.train.GradientDescentOptimizer(0.01).minimize(loss)]


def run(xla: bool, host: bool = False) -> Tuple[Sequence[str], str, List[np.ndarray]]:
    """Names of the ops that TensorFlow ran, what explain() says, and the variables after a step of two micro-batches."""
    wh.init({"xla": xla, "num_micro_batch": 2}, cluster="cpu:2")
    try:
        with tf.Graph().as_default():
            step = small(host)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                metadata = traced(session, step, {"x:0": np.arange(32.0).reshape(8, 4) / 32})
                return names(metadata), " ".join(wh.explain().split()), session.run(tf.global_variables())
    finally:
        wh.shutdown()


def names(metadata: Any) -> Sequence[str]:
    return [node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats]


@compiled
@pytest.mark.slow
def test_what_is_compiled_runs_as_one_op_and_gives_the_same_numbers() -> None:
    ran, text, variables = run(xla=True)
    assert not any(name.endswith("MatMul") for name in ran), ran
    assert "XLA compiles t0_forward, t0_backward, t1_forward, t1_backward, each when it first runs." in text
    for found, expected in zip(variables, run(xla=False)[2]):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@compiled
@pytest.mark.slow
def test_python_function_keeps_its_body_from_being_compiled() -> None:
    ran, text, _ = run(xla=True, host=True)
    assert "not t0_forward: op 'python' (PyFunc) has no XLA kernel" in text
    assert any(name.endswith("MatMul") for name in ran)


@pytest.mark.skipif(not IS_OLD, reason="other TensorFlows compile calls")
def test_tensorflow_that_compiles_no_calls() -> None:
    with pytest.raises(wh.ConfigError, match="xla is true for TaskGraph 'replicate_0', but TensorFlow 1.15.5 does not compile"):
        run(xla=True)


def test_inlined_steps_are_not_compiled() -> None:
    with pytest.raises(wh.PlanError, match="xla compiles called functions, but emit is inline"):
        train({"xla": True, "emit": "inline"}, [one_device])
