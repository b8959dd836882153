"""Each building block against the same formula in NumPy, and against its own other number type."""
from __future__ import annotations

import math
from typing import Any, List

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import layers

BLOCK = np.random.RandomState(0).randn(3, 5, 4)


def _value(*tensors: tf.Tensor) -> List[np.ndarray]:
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(list(tensors))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("batch", [3, None])
def test_fold_and_unfold_keep_the_batch_dimension(graph: tf.Graph, batch: Any) -> None:
    x = tf.placeholder(tf.float64, [batch, 5, 4])
    rows = layers.fold(x)
    assert rows.shape.as_list() == [None if batch is None else 15, 4]
    assert layers.unfold(rows, x).shape.as_list() == [batch, 5, 4]
    matrix = tf.placeholder(tf.float64, [batch, 4])
    assert layers.fold(matrix) is matrix and layers.unfold(matrix, matrix) is matrix


def test_initial_values_depend_on_name_and_seed_alone(graph: tf.Graph) -> None:
    def draw(scopes: List[str], seed: int) -> dict:
        with tf.Graph().as_default():
            for scope in scopes:
                with tf.variable_scope(scope):
                    layers.normal_variable("kernel", [4, 4], 1.0, tf.float32, seed)
            return dict(zip([v.op.name for v in tf.global_variables()], _value(*tf.global_variables())))

    first, second, other = draw(["a", "b"], 0), draw(["b", "a"], 0), draw(["a", "b"], 1)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["a/kernel"], first["b/kernel"])
    assert not np.array_equal(first["a/kernel"], other["a/kernel"])


def test_initial_values_are_the_same_on_every_tensorflow(graph: tf.Graph) -> None:
    with tf.variable_scope("scope"):
        value, = _value(layers.normal_variable("kernel", [3], 1.0, tf.float32, 7))
    # drawn once on 1.15.5; both TensorFlows must go on drawing it
    np.testing.assert_allclose(value, [0.644686, 0.947849, -1.044791], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense(graph: tf.Graph, dtype: str) -> None:
    y = layers.dense(tf.constant(BLOCK, dtype), 6, "dense", activation=tf.nn.relu)
    kernel, bias = tf.trainable_variables()
    value, weights = _value(y, kernel)
    assert [v.op.name for v in (kernel, bias)] == ["dense/kernel", "dense/bias"]
    np.testing.assert_allclose(value, np.maximum(BLOCK @ weights, 0.0), rtol=1e-4, atol=1e-6)


def test_layer_norm_and_rms_norm(graph: tf.Graph) -> None:
    x = tf.constant(BLOCK)
    layer, rms = _value(layers.layer_norm(x, "layer"), layers.rms_norm(x, "rms"))
    centred = BLOCK - BLOCK.mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(layer, centred / np.sqrt(BLOCK.var(axis=-1, keepdims=True) + 1e-5), rtol=1e-12)
    np.testing.assert_allclose(rms, BLOCK / np.sqrt((BLOCK ** 2).mean(axis=-1, keepdims=True) + 1e-6), rtol=1e-12)


def test_gelu_and_its_approximation(graph: tf.Graph) -> None:
    x = np.linspace(-4.0, 4.0, 33)
    exact, approximate = _value(layers.gelu(tf.constant(x)), layers.gelu_tanh(tf.constant(x)))
    np.testing.assert_allclose(exact, [v * 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))) for v in x], atol=1e-12)
    np.testing.assert_allclose(approximate, exact, atol=5e-4)
    assert not np.allclose(approximate, exact, atol=1e-6)


def test_attention_with_causal_bias_and_padding(graph: tf.Graph) -> None:
    rng = np.random.RandomState(1)
    query, key, value = rng.randn(3, 2, 2, 5, 4)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.float64)
    bias = layers.causal_bias(5, tf.float64) + layers.padding_bias(tf.constant(mask))
    got, = _value(layers.dot_product_attention(tf.constant(query), tf.constant(key), tf.constant(value), bias))
    scores = query @ key.transpose([0, 1, 3, 2]) / 2.0
    scores = np.where(np.tril(np.ones([5, 5])) * mask[:, None, None, :] > 0, scores, -np.inf)
    np.testing.assert_allclose(got, _softmax(scores) @ value, rtol=1e-10)


def test_multi_head_attention(graph: tf.Graph) -> None:
    x = tf.constant(BLOCK)
    y = layers.multi_head_attention(x, x, 2, "attention", stddev=0.5)
    names = ["query", "key", "value", "output"]
    kernels = [v for v in tf.trainable_variables() if v.op.name.endswith("kernel")]
    assert [v.op.name for v in kernels] == [f"attention/{name}/kernel" for name in names]
    got, *weights = _value(y, *kernels)
    query, key, value = [(BLOCK @ w).reshape([3, 5, 2, 2]).transpose([0, 2, 1, 3]) for w in weights[:3]]
    context = _softmax(query @ key.transpose([0, 1, 3, 2]) / math.sqrt(2.0)) @ value
    np.testing.assert_allclose(got, context.transpose([0, 2, 1, 3]).reshape([3, 5, 4]) @ weights[3], rtol=1e-10)


def test_tied_logits_use_the_transposed_table(graph: tf.Graph) -> None:
    table = layers.embedding_table(7, 4, "table", tf.float64)
    logits, rows, values = _value(layers.tied_logits(tf.constant(BLOCK), table),
                                  layers.embedding_lookup(table, tf.constant([[6, 0]])), table)
    np.testing.assert_allclose(logits, BLOCK @ values.T, rtol=1e-12)
    np.testing.assert_array_equal(rows, values[np.array([[6, 0]])])


def test_conv2d_is_a_sum_over_windows(graph: tf.Graph) -> None:
    image = np.random.RandomState(2).randn(1, 6, 6, 2)
    got, kernel = _value(layers.conv2d(tf.constant(image), 3, 3, "conv"), tf.trainable_variables()[0])
    padded = np.pad(image, [(0, 0), (1, 1), (1, 1), (0, 0)], "constant")
    expected = sum(padded[:, i:i + 6, j:j + 6] @ kernel[i, j] for i in range(3) for j in range(3))
    np.testing.assert_allclose(got, expected, rtol=1e-10)


@pytest.mark.parametrize("batch", [2, None])
def test_conv2d_transpose_is_the_adjoint_of_a_strided_convolution(graph: tf.Graph, batch: Any) -> None:
    rng = np.random.RandomState(3)
    small, large = rng.randn(2, 3, 3, 2), rng.randn(2, 6, 6, 1)
    x = tf.placeholder(tf.float64, [batch, 3, 3, 2])
    y = layers.conv2d_transpose(x, 1, 4, "up")
    assert y.shape.as_list() == [batch, 6, 6, 1]
    down = tf.nn.conv2d(tf.constant(large), tf.trainable_variables()[0], strides=[1, 2, 2, 1], padding="SAME")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        up, reduced = session.run([y, down], {x: small})
    np.testing.assert_allclose((up * large).sum(), (reduced * small).sum(), rtol=1e-10)


def _batch_norm(dtype: str, training: bool) -> List[np.ndarray]:
    images = np.random.RandomState(4).randn(4, 3, 3, 2) * 3.0 + 1.0
    with tf.Graph().as_default():
        x = tf.constant(images, dtype)
        y = layers.batch_norm(x, "norm", training)
        gradient = tf.gradients(tf.reduce_sum(tf.square(y) * x), x)[0]
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        assert len(updates) == (2 if training else 0)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            values = session.run([y, gradient])
            session.run(updates)
            return values + session.run([v for v in tf.global_variables() if "moving" in v.op.name])


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_the_same_fused_and_in_float64(training: bool) -> None:
    single, double = _batch_norm("float32", training), _batch_norm("float64", training)
    for left, right in zip(single, double):
        np.testing.assert_allclose(left, right, rtol=2e-4, atol=2e-4)
    assert np.allclose(double[2], 0.0) != training  # moving averages move in training only


@pytest.mark.slow
def test_batch_norm_normalises_and_averages() -> None:
    images = np.random.RandomState(4).randn(4, 3, 3, 2) * 3.0 + 1.0
    y, _, mean, variance = _batch_norm("float64", True)
    flat = images.reshape([-1, 2])
    np.testing.assert_allclose(y, (images - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5), rtol=1e-10)
    np.testing.assert_allclose(mean, 0.1 * flat.mean(0), rtol=1e-10)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * flat.var(0, ddof=1), rtol=1e-10)


def test_losses(graph: tf.Graph) -> None:
    labels = np.random.RandomState(5).randint(0, 4, [3, 5])
    weights = np.random.RandomState(6).rand(3, 5)
    picked = -np.log(np.take_along_axis(_softmax(BLOCK), labels[..., None], axis=-1)[..., 0])
    logits, none = tf.constant(BLOCK), tf.zeros([3, 5], tf.float64)
    mean, weighted, empty = _value(layers.mean_cross_entropy(logits, tf.constant(labels)),
                                   layers.weighted_cross_entropy(logits, tf.constant(labels), tf.constant(weights)),
                                   layers.weighted_cross_entropy(logits, tf.constant(labels), none))
    np.testing.assert_allclose(mean, picked.mean(), rtol=1e-10)
    np.testing.assert_allclose(weighted, (picked * weights).sum() / weights.sum(), rtol=1e-10)
    assert empty == 0.0


def test_dropout_keeps_the_expectation_and_is_absent_at_rate_zero(graph: tf.Graph) -> None:
    x = tf.ones([100, 100])
    assert layers.dropout(x, 0.0) is x
    value, = _value(layers.dropout(x, 0.2))
    assert set(np.unique(value)) == {0.0, np.float32(1.25)}
    assert abs(value.mean() - 1.0) < 0.02
