"""Control flow, look-ups, rows counted by data: a model with them, divided, computes the local numbers."""
from __future__ import annotations

import contextlib
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

PLANS: Dict[str, Tuple[Dict[str, Any], int]] = {
    "data parallel": ({}, 2), "split": ({}, 2), "rhino": ({"auto_parallel": "rhino", "auto.batch_size": 8}, 2)}
IS_FUNCTIONAL = tf.__version__ >= "2"  # loops and conditions are ops with bodies


def weights(name: str, *shape: int) -> tf.Tensor:
    return tf.get_variable(name, initializer=np.random.RandomState(zlib.crc32(name.encode()) % 1000).randn(*shape) / 2)


def loop(x: tf.Tensor) -> tf.Tensor:
    w = weights("w", 6, 6)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (0, x))[1]


def condition(x: tf.Tensor) -> tf.Tensor:
    w, v = weights("w", 6, 6), weights("v", 6, 6)
    return tf.cond(tf.placeholder_with_default(True, []), lambda: tf.tanh(tf.matmul(x, w)), lambda: tf.matmul(x, v))


def scan(x: tf.Tensor) -> tf.Tensor:
    w = weights("w", 6, 6)
    return tf.scan(lambda a, e: tf.tanh(tf.matmul(a, w) + e), tf.stack([x, x / 2]), initializer=tf.zeros_like(x))[-1]


def array(x: tf.Tensor) -> tf.Tensor:
    w, found, h = weights("w", 6, 6), tf.TensorArray("float64", 3), x
    for i in range(3):
        h = tf.tanh(tf.matmul(h, w))
        found = found.write(i, h)
    return tf.reduce_sum(found.stack(), 0)


def partition(x: tf.Tensor) -> tf.Tensor:
    side = tf.cast(x[:, 0] > 0, "int32")
    left, right = tf.dynamic_partition(x, side, 2)
    rows = tf.dynamic_partition(tf.range(tf.shape(x)[0]), side, 2)
    return tf.dynamic_stitch(rows, [tf.tanh(tf.matmul(left, weights("w", 6, 6))), tf.matmul(right, weights("v", 6, 6))])


def table(x: tf.Tensor) -> tf.Tensor:
    values = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), tf.constant([2, 0], tf.int64))
    found = tf.lookup.StaticHashTable(values, -1).lookup(tf.cast(x[:, 0] > 0, tf.int64))
    return tf.tanh(tf.matmul(x, weights("w", 6, 6)) + tf.gather(weights("v", 3, 6), found))


def averages(x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(tf.matmul(x, weights("w", 6, 6)))


def train(model: Callable[[tf.Tensor], tf.Tensor], batch: Optional[int], is_split: bool) -> List[float]:
    random = np.random.RandomState(0)
    with tf.Graph().as_default():
        x, y = tf.placeholder("float64", [batch, 6]), tf.placeholder("float64", [batch, 1])
        with contextlib.ExitStack() as stack:
            if is_split:
                stack.enter_context(wh.split(2))
            hidden = tf.tanh(tf.matmul(model(x), weights("out", 6, 4)))
            loss = tf.reduce_mean(tf.square(tf.matmul(hidden, weights("last", 4, 1)) - y))
        update = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
        if model is averages:
            with tf.control_dependencies([update]):
                update = tf.train.ExponentialMovingAverage(0.9).apply(tf.trainable_variables())
        found = []
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for count in (8, 8, batch or 7):
                found.append(session.run([loss, update], {x: random.randn(count, 6), y: random.randn(count, 1)})[0])
            return [float(value) for value in found + [np.sum(v ** 2) for v in session.run(tf.global_variables())]]


@pytest.mark.slow
@pytest.mark.parametrize("model, plan, batch", [
    (loop, "split", None), (condition, "split", 8), (condition, "rhino", None), (scan, "split", 8), (loop, "rhino", 8),
    (array, "split", None), (partition, "split", None), (partition, "data parallel", 8), (table, "split", 8),
    (table, "data parallel", None), (averages, "data parallel", None)])
def test_local_and_parallel(model: Callable, plan: str, batch: Optional[int]) -> None:
    expected = train(model, batch, False)
    config, devices = PLANS[plan]
    wh.init(config, cluster=f"cpu:{devices}")
    try:
        if model in (loop, condition, scan) and plan != "data parallel" and not IS_FUNCTIONAL:
            with pytest.raises(wh.UnsupportedOpError, match=r"op '.*' \((Enter|Switch)\) is control flow"):
                train(model, batch, plan == "split")
            return
        np.testing.assert_allclose(train(model, batch, plan == "split"), expected, rtol=1e-10)
        if plan != "rhino":  # which may find that nothing is worth dividing
            assert not wh.current_plan().is_local
    finally:
        wh.shutdown()
