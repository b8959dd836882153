"""Look-ups in tables: elementwise in their keys, wherever they stand in the model."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric import entrances
from tests.numeric.entrances import Plan, weights

TF1 = tf.__version__.startswith("1.")
BATCH, WORDS = 8, np.array(list("abcd"))[np.random.RandomState(0).randint(0, 4, (8, 3))].astype(object)
LENGTHS = [1 + row % 3 for row in range(BATCH)]
PLANS: Dict[str, Plan] = {
    **entrances.PLANS,
    "data parallel": ({}, "cpu:2", None),
    "zero": ({"zero": "v3"}, "cpu:2", None),
    "split": ({}, "cpu:2", lambda: wh.split(2)),
}


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    wh.shutdown()


def vocabulary() -> Any:
    values = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b", "c"]), tf.constant([0, 1, 2], tf.int64))
    return tf.lookup.StaticHashTable(values, 3)


def dense(feeds: Dict) -> tf.Tensor:
    words = tf.placeholder(tf.string, [None, 3])
    feeds[words] = WORDS
    return tf.reduce_sum(tf.gather(weights("table", 4, 5), vocabulary().lookup(words)), 1)


def cleaned(feeds: Dict) -> tf.Tensor:
    words = tf.placeholder(tf.string, [None, 3])
    feeds[words] = "_ " + WORDS
    keys = tf.strings.lower(tf.strings.strip(tf.regex_replace(words, "_", "")))
    lengths = tf.cast(tf.strings.length(words), tf.float64)[:, :, tf.newaxis]
    return tf.reduce_sum(lengths * tf.gather(weights("table", 4, 5), vocabulary().lookup(keys)), 1)


def lines(feeds: Dict) -> tf.Tensor:
    """The words of a line are as many as it has."""
    text = tf.placeholder(tf.string, [None])
    feeds[text] = np.array([" ".join(row[:length]) for row, length in zip(WORDS, LENGTHS)], object)
    words = tf.strings.split(text, result_type="RaggedTensor")
    numbers = words.with_values(vocabulary().lookup(words.values))
    return tf.reduce_sum(tf.gather(weights("table", 4, 5), numbers.to_tensor(3)), 1)


def sparse(feeds: Dict) -> tf.Tensor:
    words = tf.sparse_placeholder(tf.string, [None, 3])
    where = [(row, place) for row, length in enumerate(LENGTHS) for place in range(length)]
    feeds[words] = tf.SparseTensorValue(where, [WORDS[each] for each in where], [BATCH, 3])
    numbers = tf.SparseTensor(words.indices, vocabulary().lookup(words.values), words.dense_shape)
    return tf.nn.embedding_lookup_sparse(weights("table", 4, 5), numbers, None, combiner="sum")


@functools.lru_cache(maxsize=None)
def local(words: Callable[[Dict], tf.Tensor]) -> List[np.ndarray]:
    return entrances.trained(words, BATCH, None, None)[0]


@pytest.mark.half
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("words", [dense, cleaned, lines, sparse], ids=lambda words: words.__name__)
def test_look_ups_follow_their_keys(words: Callable[[Dict], tf.Tensor], plan: str) -> None:
    found, explained = entrances.trained(words, BATCH, None, PLANS[plan])
    assert words not in (dense, cleaned) or "once per mini-batch" not in explained
    for one, other in zip(found, local(words)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


if TF1:
    ROWS = 64
    KEYS = np.array(list("abcd"))[np.random.RandomState(2).randint(0, 4, ROWS)].astype(object)
    NUMBERS, TARGETS = (np.random.RandomState(width).randn(ROWS, width).astype(np.float32) for width in (2, 1))

    def embedded(features: Dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.feature_column.input_layer(features, [tf.feature_column.embedding_column(
            column(), 3, initializer=tf.constant_initializer(0.3)), tf.feature_column.numeric_column("number", (2,))])

    def counted(features: Dict[str, tf.Tensor]) -> tf.Tensor:
        return tf.feature_column.input_layer(features, [tf.feature_column.indicator_column(column())])

    def looked_up_before(features: Dict[str, tf.Tensor]) -> tf.Tensor:
        """In the input function, behind its iterator."""
        return tf.one_hot(features["looked up"], 4)

    def column() -> Any:
        return tf.feature_column.categorical_column_with_vocabulary_list("word", ["a", "b", "c"], num_oov_buckets=1)

    def estimated(layer: Callable, is_parallel: bool, batch: int, path: str) -> List[np.ndarray]:
        wh.shutdown()
        if is_parallel:  # two stages, two model replicas, each with its own mini-batches
            wh.init({"num_micro_batch": 2}, cluster="cpu:4")

        def inputs() -> Any:
            data = tf.data.Dataset.from_tensor_slices(({"word": KEYS, "number": NUMBERS}, TARGETS)).repeat().batch(batch)
            features, labels = tf.data.make_one_shot_iterator(data).get_next()
            return {**features, "looked up": vocabulary().lookup(features["word"])}, labels

        def model(features: Dict[str, tf.Tensor], labels: tf.Tensor, mode: str) -> Any:
            stage = (lambda: wh.replicate(1)) if is_parallel else contextlib.nullcontext
            initial = tf.random_uniform_initializer(-1, 1, seed=3)
            with stage():
                h = tf.layers.dense(layer(features), 4, tf.tanh, kernel_initializer=initial)
            with stage():
                loss = tf.reduce_mean(tf.square(tf.layers.dense(h, 1, kernel_initializer=initial) - labels))
            update = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=update)

        estimator = tf.estimator.Estimator(model, path)
        estimator.train(inputs, steps=4)
        return [estimator.get_variable_value(name) for name in estimator.get_variable_names()]

    @pytest.mark.parametrize("layer", [
        counted, pytest.param(embedded, marks=pytest.mark.slow), pytest.param(looked_up_before, marks=pytest.mark.slow)])
    def test_vocabulary_in_an_estimator_under_nested_pipelines(layer: Callable, tmp_path: Any) -> None:
        found = estimated(layer, True, 4, str(tmp_path / "parallel"))
        for one, other in zip(found, estimated(layer, False, 8, str(tmp_path / "local"))):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
