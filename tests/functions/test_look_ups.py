"""Look-ups in tables of functions and layers: elementwise in their keys, which may be ragged."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh

BATCH = 8


def dense() -> Any:
    return tf.constant(np.array(list("abcd"))[np.random.RandomState(0).randint(0, 4, (BATCH, 3))])


def ragged() -> Any:
    return tf.ragged.constant([list("abcd"[row % 4:]) for row in range(BATCH)])


def lines() -> Any:
    return tf.constant([" ".join("abcd"[row % 4:]) for row in range(BATCH)])


def trained(words: Callable[[], Any], config: Optional[Dict[str, Any]]) -> List[np.ndarray]:
    wh.shutdown()
    if config is not None:
        wh.init(config, cluster="cpu:2")
    values = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b", "c"]), tf.constant([0, 1, 2], tf.int64))
    table, draw = tf.lookup.StaticHashTable(values, 3), np.random.RandomState(1)
    embedding, last = tf.Variable(draw.randn(4, 5)), tf.Variable(draw.randn(5, 1))
    target = tf.constant(draw.randn(BATCH))

    @tf.function
    def step(given: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            keys = tf.strings.split(given) if given.shape.rank == 1 else given
            numbers = table.lookup(keys)
            if isinstance(numbers, tf.RaggedTensor):
                rows = tf.gather(embedding, numbers.values)
                h = tf.reduce_sum(tf.RaggedTensor.from_row_splits(rows, numbers.row_splits), axis=1)
            else:
                h = tf.reduce_sum(tf.gather(embedding, numbers), 1)
            loss = tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(tf.tanh(h), last), 1) - target))
        for variable, gradient in zip((embedding, last), tape.gradient(loss, [embedding, last])):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return [step(words()).numpy() for _ in range(3)] + [embedding.numpy(), last.numpy()]


@pytest.mark.parametrize("config", [{}, {"emit": "call"}, {"num_micro_batch": 2}], ids=["inlined", "called", "micro-batches"])
@pytest.mark.parametrize("words", [dense, ragged, lines], ids=lambda words: words.__name__)
def test_function(words: Callable[[], Any], config: Dict[str, Any]) -> None:
    for one, other in zip(trained(words, config), trained(words, None)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def fitted(config: Optional[Dict[str, Any]], cluster: str, stages: Tuple[Callable, Callable]) -> List[np.ndarray]:
    wh.shutdown()
    if config is not None:
        wh.init(config, cluster=cluster)
    tf.keras.utils.set_random_seed(3)
    first, second = stages if config is not None else (contextlib.nullcontext,) * 2
    words = tf.keras.Input((3,), dtype="string")
    with first():
        numbers = tf.keras.layers.StringLookup(vocabulary=["a", "b", "c"])(words)
        h = tf.keras.layers.GlobalAveragePooling1D()(tf.keras.layers.Embedding(4, 6)(numbers))
    with second():
        model = tf.keras.Model(words, tf.keras.layers.Dense(1)(tf.keras.layers.Dense(8, "tanh")(h)))
    model.compile("sgd", "mse")
    draw = np.random.RandomState(0)
    rows = np.array(list("abcd"))[draw.randint(0, 4, (4 * BATCH, 3))], draw.randn(4 * BATCH, 1).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
    return [np.array(model.fit(data, epochs=2, verbose=0).history["loss"]), *model.get_weights()]


@pytest.mark.parametrize("config, cluster, stages", [
    ({}, "cpu:2", (contextlib.nullcontext, contextlib.nullcontext)),
    ({"num_micro_batch": 2}, "cpu:4", (lambda: wh.replicate(1), lambda: wh.replicate(1))),
    ({}, "cpu:2", (lambda: wh.replicate(2), lambda: wh.split(2))),
], ids=["data parallel", "nested", "hybrid"])
def test_fit(config: Dict[str, Any], cluster: str, stages: Any) -> None:
    for one, other in zip(fitted(config, cluster, stages), fitted(None, "", stages)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
