"""What users feed besides arrays for placeholders: lists, names, structures, defaults, an iterator's results."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

BATCH, STEPS = 8, 3
FEATURES, TARGETS = (np.random.RandomState(width).randn(5 * BATCH, width) for width in (4, 1))
PLANS: Dict[str, Tuple[Dict[str, Any], str, bool]] = {
    "data parallel": ({}, "cpu:2", False),
    "nested": ({"num_micro_batch": 2, "io.nested_batch": "divide"}, "cpu:4", True),
    "zero": ({"zero": "v2"}, "cpu:2", False),
}


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    wh.shutdown()


class Inputs(NamedTuple):
    """``feed(session, x, y, step)`` is what a step feeds besides the learning rate."""

    x: tf.Tensor
    y: tf.Tensor
    feed: Callable[[tf.Session, np.ndarray, np.ndarray, int], Dict]


def placeholders() -> Tuple[tf.Tensor, tf.Tensor]:
    return tf.placeholder(tf.float64, [None, 4], name="x"), tf.placeholder(tf.float64, [None, 1], name="y")


def dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).repeat().batch(BATCH)


def lists() -> Inputs:
    x, y = placeholders()
    return Inputs(x, y, lambda session, a, b, step: {x: a.tolist(), y: [list(row) for row in b]})


def names() -> Inputs:
    return Inputs(*placeholders(), lambda session, a, b, step: {"x:0": a, "y:0": b.astype(np.float32)})


def structures() -> Inputs:
    x, y = placeholders()
    return Inputs(x, y, lambda session, a, b, step: {(x, y): (a, b)})


def uneven() -> Inputs:
    x, y = placeholders()
    return Inputs(x, y, lambda session, a, b, step: {x: a[:BATCH - step], y: b[:BATCH - step]})


def defaults() -> Inputs:
    """The first step takes the defaults, which have a mini-batch's static size."""
    x = tf.placeholder_with_default(FEATURES[:BATCH], [None, 4])
    y = tf.placeholder_with_default(TARGETS[:BATCH], [None, 1])
    return Inputs(x, y, lambda session, a, b, step: {x: a, y: b} if step else {})


def results_of_an_iterator() -> Inputs:
    x, y = tf.data.make_one_shot_iterator(dataset()).get_next()
    return Inputs(x, y, lambda session, a, b, step: {x: a, y: b} if step else {})


def handle_of_an_iterator() -> Inputs:
    data = dataset()
    handle = tf.placeholder(tf.string, [])
    x, y = tf.data.Iterator.from_string_handle(
        handle, tf.data.get_output_types(data), tf.data.get_output_shapes(data)).get_next()
    iterator = tf.data.make_one_shot_iterator(data).string_handle()
    return Inputs(x, y, lambda session, a, b, step: {handle: session.run(iterator)})


WAYS = [lists, names, structures, uneven, defaults, results_of_an_iterator, handle_of_an_iterator]


def trained(way: Callable[[], Inputs], plan: Optional[str]) -> List[np.ndarray]:
    wh.shutdown()
    config, cluster, is_annotated = PLANS[plan] if plan else ({}, "", False)
    if plan:
        wh.init(config, cluster=cluster)

    def weights(name: str, *shape: int) -> Any:
        return tf.get_variable(name, initializer=np.random.RandomState(len(name)).randn(*shape) / 3, use_resource=True)

    with tf.Graph().as_default():
        inputs, stage = way(), (lambda: wh.replicate(1)) if is_annotated else contextlib.nullcontext
        with stage():
            h = tf.tanh(tf.matmul(inputs.x, weights("first", 4, 6)))
        with stage():
            loss = tf.reduce_mean(tf.square(tf.matmul(h, weights("second", 6, 1)) - inputs.y))
        rate = tf.placeholder(tf.float64, [])
        update = tf.train.GradientDescentOptimizer(rate).minimize(loss)
        found: List[Any] = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for step in range(STEPS):
                rows = slice(step * BATCH, (step + 1) * BATCH)
                fed = inputs.feed(session, FEATURES[rows], TARGETS[rows], step)
                found.append(session.run([loss, update], {**fed, rate: 0.1})[0])
            found += session.run(tf.trainable_variables())
    return [np.asarray(each) for each in found]


@functools.lru_cache(maxsize=None)
def local(way: Callable[[], Inputs]) -> List[np.ndarray]:
    return trained(way, None)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_fed(way: Callable[[], Inputs], plan: str) -> None:
    for one, other in zip(trained(way, plan), local(way)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
