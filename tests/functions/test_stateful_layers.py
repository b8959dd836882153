"""Layers with a state: of each row from one mini-batch to the next, with a static batch size, or set by the first mini-batch."""
from __future__ import annotations

import contextlib
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh

BATCH = 8


def fitted(config: Optional[Dict[str, Any]], drop_remainder: bool) -> List[np.ndarray]:
    wh.shutdown()
    if config is not None:
        wh.init(config, cluster="cpu:2")
    tf.keras.utils.set_random_seed(3)
    inputs = tf.keras.Input(batch_shape=(BATCH, 5, 3))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.LSTM(6, stateful=True)(inputs)))
    model.compile("sgd", "mse")
    draw = np.random.RandomState(0)
    rows = draw.randn(4 * BATCH, 5, 3).astype(np.float32), draw.randn(4 * BATCH, 1).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH, drop_remainder=drop_remainder)
    return [np.array(model.fit(data, epochs=2, verbose=0).history["loss"]), *model.get_weights()]


@pytest.mark.parametrize("config", [{}, {"num_micro_batch": 2}], ids=["data parallel", "micro-batches"])
def test_stateful_layer_trains_if_the_data_have_its_batch_size(config: Dict[str, Any]) -> None:
    for one, other in zip(fitted(config, True), fitted(None, True)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_data_without_its_batch_size() -> None:
    message = (r"the model is built for mini-batches of 8 examples .* the data leave the batch size of '.*' open; give it to the "
               r"data: dataset.batch\(8, drop_remainder=True\)")
    with pytest.raises(wh.UnsupportedOpError, match=message):
        fitted({}, False)


class Normalised(tf.keras.layers.Layer):
    """Weight normalisation: the first mini-batch sets the scale and the offset."""

    def build(self, shape: Any) -> None:
        draw = np.random.RandomState(0)
        self.kernel = tf.Variable(draw.randn(int(shape[-1]), 4), dtype="float32", name="kernel")
        self.scale, self.offset = tf.Variable(tf.ones([4]), name="scale"), tf.Variable(tf.zeros([4]), name="offset")
        self.is_set = tf.Variable(False, trainable=False, name="is_set")
        self.built = True

    def call(self, x: Any) -> Any:
        y = tf.matmul(x, tf.math.l2_normalize(self.kernel, 0))

        def first() -> Any:
            mean, variance = tf.nn.moments(y, [0])
            self.offset.assign(-mean / tf.sqrt(variance))
            self.is_set.assign(True)
            return self.scale.assign(self.scale / tf.sqrt(variance))

        scale = tf.cond(self.is_set, self.scale.read_value, first)
        return y * scale + self.offset


def train_normalised(way: Optional[str]) -> List[np.ndarray]:
    wh.shutdown()
    block: Any = contextlib.nullcontext
    if way is not None:
        wh.init({"zero": "v1"} if way == "zero" else {}, cluster="cpu:2")
        block = {"split": lambda: wh.split(2), "pipeline": lambda: wh.replicate(1)}.get(way, lambda: wh.replicate(2))
    layer, head = Normalised(), tf.Variable(tf.ones([4, 3]))

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with block():
                hidden = layer(x)
            with block():
                loss = tf.reduce_mean(tf.square(tf.matmul(hidden, head) - y))
        weights = [layer.kernel, layer.scale, layer.offset, head]
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.1 * gradient)
        return loss

    draw = np.random.RandomState(1)
    losses = [step(tf.constant(draw.randn(8, 5), tf.float32), tf.constant(draw.randn(8, 3), tf.float32)) for _ in range(3)]
    return [np.array(losses), *(weight.numpy() for weight in (layer.kernel, layer.scale, layer.offset, head))]


@pytest.mark.slow
@pytest.mark.filterwarnings("error::whale_tf.errors.IdleWarning")
@pytest.mark.parametrize("way", ["replicas", "pipeline", "split", "zero"])
def test_condition_writes_variables_once(way: str) -> None:
    for one, other in zip(train_normalised(way), train_normalised(None)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
