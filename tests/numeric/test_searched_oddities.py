"""Searches of models that have no known cost, or nothing to divide."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import whale_tf as wh
from whale_tf._tf_compat import tf, v1

ROWS = np.random.RandomState(0).rand(8, 4)


def weights(name: str, *shape: int) -> Any:
    return v1.get_variable(name, shape, tf.float64, v1.constant_initializer(0.1), use_resource=True)


def of_unknown_rank() -> Any:
    hidden = tf.tanh(tf.matmul(v1.placeholder_with_default(ROWS, [None, 4]), weights("first", 4, 6)))
    hidden += v1.py_func(lambda value: value, [tf.stop_gradient(hidden)], tf.float64)
    return tf.reduce_mean(tf.square(tf.matmul(hidden, weights("second", 6, 1))))


def of_a_constant() -> Any:
    return tf.reduce_mean(tf.square(tf.matmul(tf.constant(ROWS), weights("first", 4, 1)) - 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("model, warned", [(of_unknown_rank, True), (of_a_constant, False)])
def test_is_searched_and_trains_as_locally(model: Any, warned: bool, recwarn: Any) -> None:
    found = []
    for is_divided in (False, True):
        with tf.Graph().as_default():
            if is_divided:
                wh.init({"auto_parallel": True}, cluster="cpu:2")
            try:
                loss = model()
                update = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
                with v1.Session() as session:
                    session.run(v1.global_variables_initializer())
                    found.append([session.run([loss, update])[0] for _ in range(3)])
                assert not is_divided or wh.current_plan() is not None
            finally:
                wh.shutdown()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-10)
    assert any("their cost is assumed" in str(one.message) for one in recwarn) is warned
