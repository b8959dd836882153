"""``random: local``: a seeded script draws the local script's numbers under every kind of plan."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

PLANS: Dict[str, Tuple[Dict[str, Any], int]] = {
    "data parallel": ({}, 4), "micro-batches": ({"num_micro_batch": 2}, 2),
    "pipeline": ({"num_task_graph": 2, "num_micro_batch": 2}, 2),
    "nested": ({"num_task_graph": 2, "num_micro_batch": 2, "io.nested_batch": "divide"}, 4),
    "rhino": ({"auto_parallel": "rhino", "auto.batch_size": 8}, 2)}


def dropout(h: tf.Tensor) -> tf.Tensor:
    return tf.nn.dropout(h, rate=0.3, seed=3)


def normal(h: tf.Tensor) -> tf.Tensor:
    return h + tf.random_normal(tf.shape(h), dtype="float64")


def truncated(h: tf.Tensor) -> tf.Tensor:
    return h * tf.truncated_normal(tf.stack([tf.shape(h)[0], 10]), dtype="float64", seed=5)


def samples(h: tf.Tensor) -> tf.Tensor:
    return h * tf.reduce_sum(tf.one_hot(tf.multinomial(h, 3, seed=4), 10, dtype="float64"), 1)


def stateless(h: tf.Tensor) -> tf.Tensor:
    return h + tf.random.stateless_normal(tf.shape(h), seed=[1, 2], dtype="float64")


def train(draw: Callable[[tf.Tensor], tf.Tensor], shape: Optional[List[Optional[int]]], alone: bool = True) -> List[float]:
    """Losses of runs with an update and (``alone``) without, and the variables' sums."""
    random = np.random.RandomState(0)
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        x, y = tf.placeholder("float64", shape and [*shape, 6]), tf.placeholder("float64", shape and [*shape, 1])
        one = tf.get_variable("one", initializer=random.randn(6, 10) / 2)
        two = tf.get_variable("two", initializer=random.randn(10, 1) / 3)
        loss = tf.reduce_mean(tf.square(tf.matmul(draw(tf.tanh(tf.matmul(x, one))), two) - y))
        update = tf.train.AdamOptimizer(0.05).minimize(loss)
        found = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for count in (8, 8, 8 if shape == [8] else 7):
                feed = {x: random.randn(count, 6), y: random.randn(count, 1)}
                found += [session.run(loss, feed)] if alone else []
                found.append(session.run([loss, update], feed)[0])
            return [float(value) for value in found + [np.sum(v ** 2) for v in session.run([one, two])]]


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("draw, plan, shape", [
    (dropout, "nested", [None]), (normal, "micro-batches", [None]), (truncated, "data parallel", [None]),
    (samples, "pipeline", [None]), (stateless, "nested", [8]), (dropout, "rhino", [8]), (dropout, "data parallel", None),
    (normal, "pipeline", [8])])
def test_seeded_script_trains_with_the_local_numbers(draw: Callable, plan: str, shape: Any) -> None:
    expected = train(draw, shape)
    config, devices = PLANS[plan]
    wh.init(dict(config, random="local"), cluster=f"cpu:{devices}")
    try:
        np.testing.assert_allclose(train(draw, shape), expected, rtol=1e-10)
        if plan != "rhino":
            assert "Random numbers equal the local script's: 1 op(s)" in wh.explain()
            assert wh.current_plan().random == "local"
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_own_numbers_are_others_than_the_local_ones() -> None:
    """What the tests above compare can fail."""
    expected = train(normal, [None])
    wh.init({}, cluster="cpu:2")
    try:
        assert max(abs(np.array(train(normal, [None])) / expected - 1)) > 1e-3
    finally:
        wh.shutdown()


def shuffled(h: tf.Tensor) -> tf.Tensor:
    return h + tf.stop_gradient(tf.random.shuffle(h, seed=3))


def shuffled_sum(h: tf.Tensor) -> tf.Tensor:
    """The clones' parts of what is shuffled are terms of a sum."""
    return h + tf.stop_gradient(tf.random.shuffle(tf.matmul(h, h, transpose_a=True), seed=3))[:1] / 10


@pytest.mark.parametrize("draw", [shuffled, shuffled_sum])
@pytest.mark.parametrize("plan", ["data parallel", "micro-batches"])
def test_rows_in_another_order(draw: Callable, plan: str) -> None:
    expected = train(draw, [None], alone=False)
    config, devices = PLANS[plan]
    try:
        wh.init(config, cluster=f"cpu:{devices}")
        np.testing.assert_allclose(train(draw, [None], alone=False), expected, rtol=1e-10)
        wh.init(dict(config, random="local"), cluster=f"cpu:{devices}")
        with pytest.raises(wh.UnsupportedOpError, match="a copy of it draws in each step"):
            train(draw, [None])
    finally:
        wh.shutdown()


def test_draws_in_a_loop_are_refused() -> None:
    def in_loop(h: tf.Tensor) -> tf.Tensor:
        noisy = lambda i, v: (i + 1, v + tf.random_normal(tf.shape(v), dtype="float64"))  # noqa: E731
        return tf.while_loop(lambda i, _: i < 2, noisy, (0, h))[1]

    wh.init({"random": "local"}, cluster="cpu:2")
    try:
        with pytest.raises(wh.UnsupportedOpError, match="random is 'local', but .* cannot draw for the whole mini-batch: "):
            train(in_loop, [None])
    finally:
        wh.shutdown()
