"""Functions and Keras under plans, with an installed package, in a process of its own that core.py starts.

They train as they do locally or, where this TensorFlow cannot be hooked, are refused.
"""
from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, List, Tuple

import numpy as np
import tensorflow as tf

import whale_tf as wh

VERSION = tuple(int(part) for part in tf.__version__.split(".")[:2])
SINCE = (2, 4)  # the first TensorFlow whose functions are divided
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(32, 6), RANDOM.randn(32, 2)
PIPELINE = {"num_micro_batch": 4}


def own_loop(annotate: Any) -> Tuple[List[float], List[np.ndarray]]:
    """A @tf.function with a GradientTape: losses and variables."""
    random = np.random.RandomState(1)
    first, second = tf.Variable(random.randn(6, 5)), tf.Variable(random.randn(5, 2))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            with annotate():
                hidden = tf.tanh(tf.matmul(x, first))
            with annotate():
                loss = tf.reduce_mean(tf.square(tf.matmul(hidden, second) - y))
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
            variable.assign_sub(0.1 * gradient)
        return loss

    losses = [float(step(X, Y)) for _ in range(3)]
    return losses, [first.numpy(), second.numpy()]


def fit(annotate: Any, keras: Any = None) -> Tuple[List[float], List[np.ndarray]]:
    """Keras' own loop: of this TensorFlow's Keras, 2 or 3, or another one."""
    keras = keras or tf.keras
    random = np.random.RandomState(2)
    inputs = keras.Input((6,))
    with annotate():
        hidden = keras.layers.Dense(5, activation="tanh")(inputs)
    with annotate():
        outputs = keras.layers.Dense(2)(2.0 * hidden)
    model = keras.Model(inputs, outputs)
    model.set_weights([0.3 * random.randn(*weight.shape) for weight in model.get_weights()])
    model.compile("adam", "mse", steps_per_execution=2)
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0)
    return history.history["loss"] + history.history["val_loss"], model.get_weights()


def fit_unbuilt(annotate: Any) -> Tuple[List[float], List[np.ndarray]]:
    """A model that learns its input's shape from the data; its initial weights are ones."""
    layers = tf.keras.layers
    with annotate():
        first = layers.Dense(5, activation="tanh", kernel_initializer="ones")
    with annotate():
        second = layers.Dense(2, kernel_initializer="ones")
    model = tf.keras.Sequential([first, second])
    model.compile("adam", "mse")
    return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"], model.get_weights()


def fit_of_tf_keras(annotate: Any) -> Tuple[List[float], List[np.ndarray]]:
    """Keras 2 beside a TensorFlow that comes with Keras 3."""
    import tf_keras

    return fit(annotate, tf_keras)


def check(train: Any, tolerance: float) -> None:
    wh.init(PIPELINE, cluster="cpu:2")
    try:
        if VERSION < SINCE:
            try:
                train(lambda: wh.replicate(1))
            except wh.WhaleError as error:
                print(f"{train.__name__}: refused ({str(error)[:60]}...)")
                return
            raise AssertionError(f"{train.__name__} was not refused")
        divided = train(lambda: wh.replicate(1))
        plan = wh.current_plan()
        assert plan is not None and len(plan.task_graphs) == 2 and plan.num_micro_batch == 4, plan
    finally:
        wh.shutdown()
    local = train(contextlib.nullcontext)
    np.testing.assert_allclose(divided[0], local[0], rtol=tolerance)
    for one, other in zip(divided[1], local[1]):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    print(f"{train.__name__}: as locally")


def check_parts(tolerance: float) -> None:
    """Variables in parts, which a function captures in their place; the optimizer takes the handles of its slots."""
    def train() -> Tuple[List[float], List[np.ndarray]]:
        optimizers = tf.keras.optimizers
        model = tf.keras.Sequential([tf.keras.layers.Dense(4, input_shape=(6,)), tf.keras.layers.Dense(2)])
        model.set_weights([np.random.RandomState(3).randn(*weight.shape) for weight in model.get_weights()])
        model.compile(getattr(optimizers, "legacy", optimizers).Adam(0.1) if VERSION < (2, 16) else "adam", "mse")
        losses = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
        return losses, model.get_weights()

    wh.init(cluster="cpu:2")
    try:
        wh.set_default_strategy(wh.split(2))
        divided = train()
        assert wh.current_plan().shards, "nothing is divided"
    finally:
        wh.shutdown()
    local = train()
    for one, other in zip([divided[0], *divided[1]], [local[0], *local[1]]):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    print("parts of variables: as locally")


if __name__ == "__main__":
    check(own_loop, 1e-12)
    if VERSION >= SINCE:
        check(fit, 1e-4)
        check(fit_unbuilt, 1e-4)
        check_parts(1e-4)
    if importlib.util.find_spec("tf_keras"):
        check(fit_of_tf_keras, 1e-4)
