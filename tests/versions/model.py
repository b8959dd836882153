"""The model of the numeric core, and a script of its own: an MLP of three layers with momentum, in float64."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

BATCH, WIDTH, STEPS = 16, 8, 6

Scope = Callable[[], Any]


class Model(NamedTuple):
    features: Any
    labels: Any
    loss: Any
    train_op: Any


def dense(x: Any, name: str, columns: int) -> Any:
    kernel = tf.get_variable(f"{name}/kernel", [x.shape[1], columns], tf.float64,
                             tf.random_normal_initializer(stddev=0.3, seed=len(name), dtype=tf.float64))
    bias = tf.get_variable(f"{name}/bias", [columns], tf.float64, tf.zeros_initializer())
    return tf.matmul(x, kernel) + bias


def build(first: Scope = contextlib.nullcontext, second: Scope = contextlib.nullcontext) -> Model:
    """The graph; ``first`` and ``second`` are the scopes of its two halves."""
    features = tf.placeholder(tf.float64, [BATCH, WIDTH], name="features")
    labels = tf.placeholder(tf.float64, [BATCH, WIDTH], name="labels")
    with first():
        x = tf.tanh(dense(features, "in", 2 * WIDTH))
    with second():
        x = tf.tanh(dense(x, "middle", 2 * WIDTH))
        loss = tf.reduce_mean(tf.square(dense(x, "output", WIDTH) - labels))
    return Model(features, labels, loss, tf.train.MomentumOptimizer(0.2, 0.9).minimize(loss))


def mini_batch(model: Model, step: int) -> Any:
    """The same numbers in every run."""
    numbers = np.random.RandomState(step)
    return {model.features: numbers.normal(size=[BATCH, WIDTH]), model.labels: numbers.normal(size=[BATCH, WIDTH])}


if __name__ == "__main__":
    tf.disable_eager_execution()
    script = build()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number in range(STEPS):
            session.run(script.train_op, mini_batch(script, number))
