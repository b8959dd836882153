"""Loops over the rows of the mini-batch (``tf.map_fn``, ``for row in x``): each part of the mini-batch has its own rounds."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import Scope, Way, check

Loss = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
DATA = Way((), 2, {})
DATA_4 = Way((), 4, {"num_micro_batch": 2})
PIPELINE = Way((1, 1), 2, {"num_micro_batch": 4})
ROW = tf.TensorSpec([3], tf.float64)


def variable(*shape: int, seed: int = 1) -> tf.Variable:
    return tf.Variable(np.random.RandomState(seed).randn(*shape) / 3)


def projected(row: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matvec(last, row, transpose_a=True)


def mapped(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(y * tf.map_fn(lambda row: tf.tanh(projected(row, last)), h, fn_output_signature=ROW))


def mapped_pairs(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    found = tf.map_fn(lambda pair: (tf.reduce_sum(tf.square(projected(pair[0], last) - pair[1])), pair[0] * pair[1][0]), (h, y),
                      fn_output_signature=(tf.float64, tf.TensorSpec([5], tf.float64)))
    return tf.reduce_sum(found[0]) + tf.reduce_mean(tf.square(found[1]))


def summed(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    total = tf.constant(0.5, tf.float64)
    for row in h:
        total += tf.reduce_logsumexp(projected(row, last))
    return total / tf.cast(tf.shape(h)[0], tf.float64) + tf.reduce_mean(y)


def branching(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    def row_of(row: tf.Tensor) -> tf.Tensor:
        longer = tf.while_loop(lambda i, _: i < 3, lambda i, state: (i + 1, tf.tanh(state) + row), [0, row])[1]
        return tf.cond(tf.reduce_sum(row) > 0.0, lambda: projected(longer, last), lambda: -2.0 * projected(row, last))

    return tf.reduce_mean(tf.square(tf.map_fn(row_of, h, fn_output_signature=ROW) - y))


def carried(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    state = tf.zeros([5], tf.float64)
    for row in h:
        state = 0.9 * state + row
    return tf.reduce_sum(tf.square(projected(state, last))) + tf.reduce_mean(y)


def exchanged(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    one, other = tf.zeros([5], tf.float64), tf.zeros([5], tf.float64)
    for row in h:
        one, other = other + row, one + tf.square(row)
    return tf.reduce_sum(projected(2.0 * one + other, last)) + tf.reduce_mean(y)


def numbered(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    numbers = tf.range(tf.shape(h)[0])
    found = tf.map_fn(lambda pair: pair[0] * tf.cast(pair[1], tf.float64), (h, numbers), fn_output_signature=tf.float64)
    return tf.reduce_mean(tf.square(tf.matmul(found, last) - y))


def averaged(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    root = lambda: tf.sqrt(tf.cast(tf.shape(h)[0], tf.float64))  # noqa: E731 (in the function)
    found = tf.map_fn(lambda row: tf.tanh(projected(row, last)) / root(), h, fn_output_signature=ROW)
    return tf.reduce_mean(tf.square(found - y))


def compared(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_logsumexp(tf.linalg.matvec(h, row)), h)) + tf.reduce_mean(
        tf.square(tf.matmul(h, last) - y))


def collected(h: tf.Tensor, y: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
    """A loop that puts means of all rows into a list, of which a gradient is not linear."""
    means = tf.TensorArray(tf.float64, size=0, dynamic_size=True, element_shape=[5])
    for i in tf.range(3):
        means = means.write(i, tf.reduce_mean(h, 0) * tf.cast(i, tf.float64))
    return tf.reduce_sum(tf.square(means.stack())) + tf.reduce_mean(tf.matmul(h, last) * y)


def training(loss_of: Loss, size: Any, said: List[str]) -> Callable[[Sequence[Scope]], Tuple[Any, Sequence[tf.Variable]]]:
    def build(stages: Sequence[Scope]) -> Tuple[Any, Sequence[tf.Variable]]:
        weights = [variable(6, 5), variable(5, 3, seed=2)]

        @tf.function(input_signature=[tf.TensorSpec([size, 6], tf.float64), tf.TensorSpec([size, 3], tf.float64)])
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with stages[0]():
                    hidden = tf.tanh(tf.matmul(x, weights[0]))
                with stages[1]():
                    loss = loss_of(hidden, y, weights[1])
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
    (mapped, None, DATA), (mapped, 8, PIPELINE), (mapped_pairs, None, DATA_4), (summed, 8, DATA), (summed, None, PIPELINE),
    (branching, None, DATA)])
def test_rounds_are_divided(loss_of: Loss, size: Any, way: Way) -> None:
    said: List[str] = []
    check(training(loss_of, size, said), way, rows(8, 8) if size else rows(8, 9))
    assert f"Divided over {way.devices} devices: 100% of the floating-point" in said[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::whale_tf.IdleWarning")
@pytest.mark.parametrize("loss_of, size, reason", [
    (carried, None, "it carries a value from one row of the batch to the next"), (exchanged, 8, "it carries a value"),
    (collected, None, "its loop runs over all examples"),
    (averaged, None, "a round of its loop computes with the number of examples"),
    (numbered, None, "it computes with the position of a row"), (compared, 8, "it needs other examples than the row's")])
def test_rounds_that_need_others_run_on_all_rows(loss_of: Loss, size: Any, reason: str) -> None:
    said: List[str] = []
    check(training(loss_of, size, said), DATA, rows(8, 8) if size else rows(8, 9))
    assert reason in said[0]
