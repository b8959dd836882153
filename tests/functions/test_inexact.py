"""Ops whose results differ from the local script's, in functions and ``fit``: told once, or refused before anything runs."""
from __future__ import annotations

import warnings
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.equality import clear_keras

ROWS = np.random.RandomState(0).randn(20, 4).astype("float32")
Train = Callable[[], List[np.ndarray]]


def of_a_function() -> Tuple[Train, Train]:
    """A step that is traced twice, because the last mini-batch is smaller, and a function that gives the variables."""
    kernel, scale, offset = tf.Variable(tf.ones([4, 3])), tf.Variable(tf.ones([3])), tf.Variable(tf.zeros([3]))

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = tf.matmul(x, kernel)[:, None, None]
            y = tf.compat.v1.nn.fused_batch_norm(y, scale, offset, name="norm/fused")[0]
            loss = tf.reduce_mean(tf.square(y - 1.0))
        for variable, gradient in zip([kernel, scale, offset], tape.gradient(loss, [kernel, scale, offset])):
            variable.assign_sub(0.1 * gradient)
        return loss

    def values() -> List[np.ndarray]:
        return [variable.numpy() for variable in (kernel, scale, offset)]

    def train() -> List[np.ndarray]:
        for first in range(0, 20, 8):
            step(tf.constant(ROWS[first:first + 8]))
        return values()

    return train, values


def of_fit() -> Tuple[Train, Train]:
    layers = tf.keras.layers
    model = tf.keras.Sequential([
        layers.Dense(3, input_shape=(4,)), *(layers.BatchNormalization(name=f"norm_{i}") for i in range(4)), layers.Dense(1)])
    model.compile("sgd", "mse")

    def train() -> List[np.ndarray]:
        model.fit(ROWS, ROWS[:, :1], batch_size=8, verbose=0)
        return model.get_weights()

    return train, model.get_weights


@pytest.mark.slow
@pytest.mark.parametrize("build", [of_a_function, of_fit])
def test_inexact_op(build: Callable[[], Tuple[Train, Train]]) -> None:
    def told(config: Any) -> int:
        wh.init(config, cluster="cpu:2")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train, values = build()
            before = values()
            if config.get("on_inexact") == "error":
                with pytest.raises(wh.InexactError, match="norm.* not compute what the local script computes"):
                    train()
                for value, expected in zip(values(), before):
                    np.testing.assert_array_equal(value, expected)
            else:
                after = train()
                assert not np.array_equal(after[0], before[0])
                if build is of_fit and config == {}:
                    texts = [str(each.message) for each in caught]
                    assert any("in 4 layers (" in text and "norm_2" in text and "norm_3" not in text for text in texts), texts
        wh.shutdown()
        clear_keras()
        return sum(issubclass(each.category, wh.InexactWarning) for each in caught)

    assert [told({}), told({"on_inexact": "allow"}), told({"on_inexact": "error"})] == [1, 0, 0]
