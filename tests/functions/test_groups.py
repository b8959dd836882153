"""Groups of examples in neighbouring rows: every second row, pairs, and bags are divided group by group."""
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
Groups = Tuple[tf.Tensor, tf.Tensor]  # features and targets
GroupsOf = Callable[[tf.Tensor, tf.Tensor], Groups]


def neighbours(z: tf.Tensor, y: tf.Tensor) -> Groups:
    """Pairs."""
    return tf.square(z[0::2] - z[1::2]), y[::2] * y[1::2]


def quadruples(z: tf.Tensor, y: tf.Tensor) -> Groups:
    one, two, three, four = (z[i::4] for i in range(4))
    return one * two - three * four, y[::4] + y[3::4]


def bags(z: tf.Tensor, y: tf.Tensor) -> Groups:
    return tuple(tf.reduce_max(tf.reshape(each, [-1, 4, each.shape[1]]), 1) for each in (z, y))


def every_second(z: tf.Tensor, y: tf.Tensor) -> Groups:
    """Nothing says that there is an even number of rows."""
    return z[::2], y[::2]


def both_halves(z: tf.Tensor, y: tf.Tensor) -> Groups:
    return z[::2] + tf.reduce_mean(z[1::2], 0), y[::2]


def training(groups_of: GroupsOf, size: Any, said: List[str]) -> Callable[[Sequence[Scope]], Tuple[Any, List[tf.Variable]]]:
    def build(stages: Sequence[Scope]) -> Tuple[Any, List[tf.Variable]]:
        rng = np.random.RandomState(1)
        weights = [tf.Variable(rng.randn(6, 5) / 3), tf.Variable(rng.randn(5, 3) / 3)]

        @tf.function(input_signature=[tf.TensorSpec([size, 6], tf.float64), tf.TensorSpec([size, 3], tf.float64)])
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with stages[0]():
                    hidden = tf.tanh(tf.matmul(x, weights[0]))
                with stages[1]():
                    features, targets = groups_of(hidden, y)
                    loss = tf.reduce_mean(tf.square(tf.matmul(features, weights[1]) - targets))
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
@pytest.mark.parametrize("groups_of, size, way", [
    (neighbours, None, DATA_4), (neighbours, 16, PIPELINE), (quadruples, None, PIPELINE), (quadruples, 16, DATA),
    (bags, None, DATA), (bags, 16, PIPELINE)])
def test_groups_are_divided(groups_of: GroupsOf, size: Any, way: Way) -> None:
    said: List[str] = []
    check(training(groups_of, size, said), way, rows(16, 16) if size else rows(16, 24))
    assert f"Divided over {way.devices} devices: 100% of the floating-point" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("groups_of", [every_second, both_halves])
def test_every_second_row_of_an_odd_number_of_rows(groups_of: GroupsOf) -> None:
    check(training(groups_of, None, []), DATA, rows(8, 9))
