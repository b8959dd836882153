"""Clones draw numbers of their own, whether a seed is an attribute or an operand."""
from __future__ import annotations

from typing import Any, Callable, Dict

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh


def from_seed_attribute(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform(tf.shape(x), seed=3)


def from_seed_operand(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform(tf.shape(x), seed)


def in_a_loop(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, tf.random.stateless_uniform(tf.shape(x), seed)),
                         (0, tf.zeros_like(x)), shape_invariants=(tf.TensorShape([]), x.shape))[1]


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"emit": "call"}], ids=["inlined", "called"])
@pytest.mark.parametrize("draw", [from_seed_attribute, from_seed_operand, in_a_loop], ids=lambda draw: draw.__name__)
def test_clones_do_not_repeat_numbers(draw: Callable, config: Dict[str, Any]) -> None:
    tf.random.set_seed(1)
    wh.init(dict(config, num_micro_batch=2), cluster="cpu:2")
    w, seed = tf.Variable(np.ones([5, 1], np.float32)), tf.Variable([1, 2])

    @tf.function(input_signature=[tf.TensorSpec([None, 5])])  # of a static size they would be drawn once, and divided
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            drawn = draw(x, seed)
            loss = tf.reduce_mean(tf.matmul(x * drawn, w))
        w.assign_sub(tape.gradient(loss, w))
        return drawn

    numbers = step(tf.ones([8, 5])).numpy()
    assert numbers.shape == (8, 5) and 0.1 < numbers.mean() < 0.9
    parts = {part.tobytes() for part in np.split(numbers, 4)}
    assert len(parts) == 4
