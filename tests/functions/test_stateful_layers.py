"""Layers that keep a state of each row from one mini-batch to the next, so that the model has a static batch size."""
from __future__ import annotations

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
def test_a_stateful_layer_trains_if_the_data_have_its_batch_size(config: Dict[str, Any]) -> None:
    for one, other in zip(fitted(config, True), fitted(None, True)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_data_without_its_batch_size() -> None:
    message = (r"the model is built for mini-batches of 8 examples .* the data leave the batch size of '.*' open; give it to the "
               r"data: dataset.batch\(8, drop_remainder=True\)")
    with pytest.raises(wh.UnsupportedOpError, match=message):
        fitted({}, False)
