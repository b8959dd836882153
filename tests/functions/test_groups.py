"""Groups of examples in neighbouring rows: every second row, pairs, and virtual batches are divided group by group."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import Scope, Way, check

DATA = Way((), 2, {})
DATA_4 = Way((), 4, {"num_micro_batch": 2})
PIPELINE = Way((1, 1), 2, {"num_micro_batch": 2})
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def neighbours(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Distances of pairs; labels say which belong together."""
    distance = tf.sqrt(tf.reduce_sum(tf.square(z[0::2] - z[1::2]), 1) + 1e-6)
    same = tf.cast(y[::2, 0] * y[1::2, 0] > 0.0, tf.float64)
    return tf.reduce_mean(same * tf.square(distance) + (1.0 - same) * tf.square(tf.maximum(1.0 - distance, 0.0)))


def triplets(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    anchor, positive, negative, other = (z[i::4] for i in range(4))
    near, far = (tf.reduce_sum(tf.square(anchor - other), 1) for other in (positive, 0.5 * (negative + other)))
    return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0)) + tf.reduce_mean(z * y)


def virtual_batches(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    groups = tf.reshape(z, [-1, 4, 3])
    mean, variance = tf.nn.moments(groups, 1, keepdims=True)
    normal = tf.reshape((groups - mean) * tf.math.rsqrt(variance + 1e-3), [-1, 3])
    return tf.reduce_mean(tf.square(normal - y))


def every_second(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Nothing says that there is an even number of rows."""
    return tf.reduce_mean(tf.square(z[::2])) + tf.reduce_mean(z * y)


def both_halves(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return every_second(z, y) + tf.reduce_mean(z[1::2])


def training(loss_of: Loss, size: Any, said: List[str]) -> Callable[[Sequence[Scope]], Tuple[Any, List[tf.Variable]]]:
    def build(stages: Sequence[Scope]) -> Tuple[Any, List[tf.Variable]]:
        rng = np.random.RandomState(1)
        weights = [tf.Variable(rng.randn(6, 5) / 3), tf.Variable(rng.randn(5, 3) / 3)]

        @tf.function(input_signature=[tf.TensorSpec([size, 6], tf.float64), tf.TensorSpec([size, 3], tf.float64)])
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with stages[0]():
                    hidden = tf.tanh(tf.matmul(x, weights[0]))
                with stages[1]():
                    loss = loss_of(tf.matmul(hidden, weights[1]), y)
            for w, gradient in zip(weights, tape.gradient(loss, weights)):
                w.assign_sub(0.1 * gradient)
            return loss

        def call(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            loss = step(x, y)
            with contextlib.suppress(wh.WhaleError):  # wh.init was not called
                said.append(" ".join(wh.explain().split()))
            return loss

        return call, weights

    return build


def rows(*sizes: int) -> Sequence[Tuple[np.ndarray, np.ndarray]]:
    rng = np.random.RandomState(0)
    return [(rng.randn(size, 6), rng.randn(size, 3)) for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("loss_of, size, way", [
    (neighbours, None, DATA_4), (neighbours, 16, PIPELINE), (triplets, None, PIPELINE), (triplets, 16, DATA),
    (virtual_batches, None, DATA), (virtual_batches, 16, PIPELINE)])
def test_groups_are_divided(loss_of: Loss, size: Any, way: Way) -> None:
    said: List[str] = []
    check(training(loss_of, size, said), way, rows(16, 16) if size else rows(16, 24))
    assert f"Divided over {way.devices} devices: 100% of the floating-point" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", [every_second, both_halves])
def test_every_second_row_of_an_odd_number_of_rows(loss_of: Loss) -> None:
    check(training(loss_of, None, []), DATA, rows(8, 9))
