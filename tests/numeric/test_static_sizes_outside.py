"""Metrics that are computed outside of the differentiated step, from the mini-batches of all model replicas, in graphs that are
built for the size of one: equal to the local script on all rows, refused, or warned of."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

STEPS, BATCH = 2, 4
DATA = np.random.RandomState(0).randn(16, 8)

METRICS: Dict[str, Callable[[Any, Any, Any], Any]] = {
    "mean": lambda x, p, y: tf.reduce_mean(tf.abs(p - y)),
    "sum": lambda x, p, y: tf.reduce_sum(p),
    "rows": lambda x, p, y: p,
    "input": lambda x, p, y: x,
    "accuracy": lambda x, p, y: tf.reduce_mean(tf.cast(tf.equal(tf.argmax(p, 1), tf.argmax(y, 1)), tf.float64)),
    "axes": lambda x, p, y: tf.reduce_mean(tf.reshape(p, [-1, 3, 1, 1]), [0, 1, 2, 3]),
    "weights": lambda x, p, y: tf.reduce_mean(x[:, :4] * np.array([0.1, 0.2, 0.3, 0.4])),
    "class means": lambda x, p, y: tf.reshape(tf.reduce_mean(x[:, :4], 0) * np.array([0.1, 0.2, 0.3, 0.4]), [4, 1]),
    "loss": lambda x, p, y: tf.losses.absolute_difference(y, p),
    "by size": lambda x, p, y: tf.reduce_sum(p) / tf.cast(tf.size(p), tf.float64),
    "reshaped": lambda x, p, y: tf.reduce_max(tf.reshape(p, [BATCH, -1]), 1),
    "by a number": lambda x, p, y: tf.reduce_sum(p) / float(BATCH),
}


def trained(name: str, batch: int, is_static: bool, config: Optional[Dict[str, Any]] = None) -> Tuple[List[Any], List[str]]:
    """A metric of each step, and the warnings of inexact values."""
    with tf.Graph().as_default(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if config is not None:
            wh.init(config, cluster="cpu:2")
            wh.set_default_strategy(wh.replicate(1))
        dataset = tf.data.Dataset.from_tensor_slices(DATA).batch(batch, drop_remainder=is_static)
        iterator = tf.data.make_initializable_iterator(dataset)
        x = iterator.get_next()
        w = tf.get_variable("w", [8, 3], tf.float64, tf.constant_initializer(np.linspace(-1, 1, 24).reshape(8, 3)))
        predicted, wanted = tf.matmul(x, w), x[:, :3]
        train = tf.train.GradientDescentOptimizer(0.05).minimize(tf.reduce_mean(tf.square(predicted - wanted)))
        metric = METRICS[name](x, predicted, wanted)
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            found = [session.run([metric, train])[0] for _ in range(STEPS)]
    wh.shutdown()
    return found, [str(one.message) for one in caught if issubclass(one.category, wh.InexactWarning)]


@pytest.mark.parametrize("config", [{}, {"io.batch": "micro"}], ids=["own", "micro"])
@pytest.mark.parametrize("name", ["mean", "sum", "rows", "input", "accuracy", "axes", "weights", "class means"])
def test_equals_local_on_all_rows(name: str, config: Dict[str, Any]) -> None:
    found, told = trained(name, BATCH, True, config)
    for one, local in zip(found, trained(name, 2 * BATCH, True)[0]):
        np.testing.assert_allclose(one, local, rtol=1e-12)
    assert not told


@pytest.mark.parametrize("name", ["loss", "by size"])
def test_open_size_equals_local(name: str) -> None:
    found, _ = trained(name, BATCH, False, {})
    for one, local in zip(found, trained(name, 2 * BATCH, False)[0]):
        np.testing.assert_allclose(one, local, rtol=1e-12)


@pytest.mark.parametrize("name", ["loss", "by size", "reshaped"])
def test_constant_with_the_size_of_one_is_refused(name: str) -> None:
    with pytest.raises(wh.UnsupportedOpError, match=r"from the rows of 2 mini-batches.*made for the 4 rows of one; leave"):
        trained(name, BATCH, True, {})


def test_number_that_may_be_a_size_is_warned_of() -> None:
    _, told = trained("by a number", BATCH, True, {})
    assert len(told) == 1 and "4.0, which may be a number of rows of one" in told[0]


def test_one_mini_batch_is_never_refused() -> None:
    found, told = trained("loss", 2 * BATCH, True, {"io.nested_batch": "divide"})
    for one, local in zip(found, trained("loss", 2 * BATCH, True)[0]):
        np.testing.assert_allclose(one, local, rtol=1e-12)
    assert not told
