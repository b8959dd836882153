"""Sparse inputs of functions and of ``fit``: sums of looked-up rows and sparse products are divided by examples."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh

WORDS, COLUMNS = 11, 5


def step_of(name: str, variables: List[tf.Variable], is_signed: bool) -> Any:
    table, wide, last = variables

    def step(words: tf.SparseTensor, weights: tf.SparseTensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            if name == "product":
                rows = tf.sparse.sparse_dense_matmul(weights, wide)
            elif name == "safe":
                rows = tf.nn.safe_embedding_lookup_sparse(table, words)
            else:
                rows = tf.nn.embedding_lookup_sparse(table, words, weights if "weighted" in name else None,
                                                     combiner=name.split()[-1])
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.tanh(rows + x), last) - y))
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            if gradient is not None:
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    sparse = [tf.SparseTensorSpec([None, COLUMNS], dtype) for dtype in (tf.int64, tf.float64)]
    dense = [tf.TensorSpec([None, size], tf.float64) for size in (4, 1)]
    return tf.function(step, input_signature=sparse + dense if is_signed else None)


def trained(name: str, config: Optional[Dict[str, Any]], cluster: str, is_signed: bool) -> List[Any]:
    """Losses, variables, and what the plan says."""
    wh.shutdown()
    if config is not None:
        wh.init(config, cluster=cluster)
    rng = np.random.RandomState(0)
    variables = [tf.Variable(rng.randn(*shape)) for shape in ((WORDS, 4), (COLUMNS, 4), (4, 1))]
    step, losses = step_of(name, variables, is_signed), []
    for size in (8, 9):
        counts = rng.randint(0, COLUMNS, size)
        counts[:3], counts[-1] = 0, 2  # the first of four parts has no element
        where = np.array([(row, column) for row, count in enumerate(counts) for column in range(count)], np.int64)
        words, weights = (tf.SparseTensor(where, values, [size, COLUMNS]) for values in (
            rng.randint(0, WORDS, len(where)), rng.rand(len(where)) + 0.5))
        losses.append(step(words, weights, tf.constant(rng.randn(size, 4)), tf.constant(rng.randn(size, 1))).numpy())
    explained = "" if config is None else wh.explain()
    wh.shutdown()
    return [np.array(losses), *(variable.numpy() for variable in variables), explained]


@pytest.mark.parametrize("name, config, cluster, is_signed", [
    ("sum", {"num_micro_batch": 2}, "cpu:2", True), ("weighted sqrtn", {"emit": "call"}, "cpu:4", True),
    ("weighted mean", {}, "cpu:2", False), ("product", {"num_micro_batch": 2}, "cpu:2", False), ("safe", {}, "cpu:4", True)])
def test_function(name: str, config: Dict[str, Any], cluster: str, is_signed: bool) -> None:
    *found, explained = trained(name, config, cluster, is_signed)
    for one, other in zip(trained(name, None, "", is_signed), found):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-13)
    assert "need all examples" not in explained and "Divided over" in explained


def fitted(cluster: str) -> List[np.ndarray]:
    if cluster:
        wh.init(cluster=cluster)
    keras = tf.keras
    keras.utils.set_random_seed(1)
    rng = np.random.RandomState(0)
    dense = np.maximum(rng.randn(24, 6), 0)
    dense[3] = 0
    sparse, x = keras.Input((6,), sparse=True, dtype="float64"), keras.Input((4,), dtype="float64")
    hidden = keras.layers.Dense(4, "tanh", dtype="float64")(sparse)
    last = keras.layers.Dense(1, dtype="float64")(keras.layers.concatenate([hidden, x], dtype="float64"))
    model = keras.Model([sparse, x], last)
    model.compile("sgd", "mse")
    data = (tf.sparse.from_dense(dense), rng.randn(24, 4)), rng.randn(24, 1)
    losses = model.fit(tf.data.Dataset.from_tensor_slices(data).batch(8), epochs=2, verbose=0).history["loss"]
    explained = wh.explain() if cluster else ""
    wh.shutdown()
    assert "need all examples" not in explained
    return [np.array(losses), *model.get_weights()]


def test_fit() -> None:
    for one, other in zip(fitted(""), fitted("cpu:2")):
        np.testing.assert_allclose(other, one, rtol=1e-6 if one.ndim == 1 else 1e-9, atol=1e-12)
