"""Clones draw numbers of their own, whether a seed is an attribute or an operand."""
from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Sequence

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import WAYS, Scope, batches, check


def from_seed_attribute(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform(tf.shape(x), seed=3)


def from_seed_operand(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform(tf.shape(x), seed)


def shuffled(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """As mixup does: the rows of the mini-batch in another order."""
    return tf.random.shuffle(x + tf.cast(tf.range(tf.shape(x)[0]), tf.float32)[:, None], seed=3)


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


def trained(numbers: Callable[[tf.Tensor], tf.Tensor]) -> np.ndarray:
    """What two steps draw (``numbers``, of a mini-batch), and the weights after them."""
    w = tf.Variable(np.ones([5, 1], np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 5])])
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            drawn = numbers(x)
            loss = tf.reduce_mean(tf.matmul(x * drawn, w))
        w.assign_sub(tape.gradient(loss, w))
        return drawn

    return np.concatenate([step(tf.ones([8, 5])).numpy(), step(tf.ones([7, 5])).numpy(), w.numpy().T])


def from_seed(draw: Callable) -> np.ndarray:
    tf.random.set_seed(1)
    seed = tf.Variable([1, 2])
    return trained(lambda x: draw(tf.square(x), seed))


def from_generator() -> np.ndarray:
    """It moves on by the numbers that it draws for the whole mini-batch, of which every clone computes a part."""
    generator = tf.random.Generator.from_seed(1)

    def numbers(x: tf.Tensor) -> tf.Tensor:
        first = x * generator.uniform(tf.shape(tf.square(x)))
        return first * generator.uniform(tf.shape(first))

    return trained(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [
    partial(from_seed, from_seed_attribute), partial(from_seed, from_seed_operand), partial(from_seed, shuffled), from_generator],
    ids=["seed attribute", "seed operand", "shuffled", "generator"])
def test_local_numbers(numbers: Callable[[], np.ndarray]) -> None:
    """``random: local``: a function draws what it would draw undivided."""
    expected = numbers()
    wh.init({"random": "local", "num_micro_batch": 2}, cluster="cpu:2")
    np.testing.assert_allclose(numbers(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_keras_dropout_with_the_local_numbers() -> None:
    """A seed generator is a variable, which is advanced once per step."""
    keras = pytest.importorskip("keras", "3")

    def losses() -> np.ndarray:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(8), keras.layers.Dropout(0.4, seed=2),
                                  keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.RandomState(0).randn(16, 5).astype("float32")
        history = model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        return np.concatenate([history, *[w.ravel() for w in model.get_weights()]])

    expected = losses()
    wh.init({"random": "local", "num_micro_batch": 2}, cluster="cpu:2")
    np.testing.assert_allclose(losses(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["data parallel 2", "4 micro-batches", "stages of 1 and 2, called"])
def test_draws_beside_all_examples(name: str) -> None:
    """Noise shaped like values that need all examples is drawn once, with these."""
    def build(scopes: Sequence[Scope]) -> Any:
        weights, seed = tf.Variable(np.ones([6, 1])), tf.Variable([1, 2])

        @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with scopes[0]():
                    z = tf.square(x)
                with scopes[1]():
                    ordered = tf.sort(z @ weights, 0)
                    noise = tf.random.stateless_uniform(tf.shape(ordered), seed, dtype=tf.float64)
                    noise += tf.random.uniform(tf.shape(ordered), seed=5, dtype=tf.float64)
                    loss = tf.reduce_mean(tf.square(ordered - noise))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            return loss

        return step, [weights]

    check(build, WAYS[name], batches())
