"""Ops that need all examples together at a model's entrance: they run once, and the layers behind them are divided again."""
from __future__ import annotations

import functools
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric import entrances
from tests.numeric.entrances import Plan, weights
from tests.numeric.unequal import described

BATCH = 12
PLANS: Dict[str, Plan] = {
    **entrances.PLANS,
    "data parallel": ({}, "cpu:3", None),
    "two stages": ({"num_micro_batch": 3}, "cpu:2", lambda: wh.replicate(1)),
    "unequal": ({}, described([(200, 1024), (100, 1024)]), None),
}
Entrance = Callable[[Dict, Optional[int]], tf.Tensor]


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    """Loops are functions."""
    was_enabled = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    yield
    wh.shutdown()
    if not was_enabled:
        tf.disable_control_flow_v2()


def lines_of_words(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    lines, random = tf.placeholder(tf.string, [batch]), np.random.RandomState(0)
    feeds[lines] = np.array([" ".join(random.choice(list("abcd"), 1 + row % 3)) for row in range(BATCH)], object)
    return lines


def text(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Words of lines, padded to the longest line."""
    words = tf.strings.split(lines_of_words(feeds, batch), result_type="RaggedTensor").to_tensor("")
    found = tf.gather(weights("table", 5, 4), tf.strings.to_hash_bucket_fast(words, 5))
    hidden = tf.reshape(tf.reshape(found, [-1, 4]) @ weights("dense", 4, 5), [tf.shape(words)[0], tf.shape(words)[1], 5])
    return tf.reduce_sum(hidden, 1)


def characters(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Codes of characters, and of the characters of lines that are put together from words of other lines."""
    lines = lines_of_words(feeds, batch)
    words = tf.strings.split(lines, result_type="RaggedTensor")
    picked = tf.gather(words, tf.range(words.nrows())[::-1])
    joined = tf.strings.unicode_decode(tf.strings.reduce_join(picked.to_tensor("."), 1), "UTF-8")
    lengths = tf.strings.length(tf.strings.unicode_encode(joined, "UTF-8"))
    codes = tf.concat([tf.strings.unicode_decode(lines, "UTF-8").to_tensor(0), lengths[:, tf.newaxis]], 1) % 5
    return tf.reduce_sum(tf.gather(weights("table", 5, 5), codes), 1)


def steps(feeds: Dict, batch: Optional[int], with_lengths: bool = False) -> tf.Tensor:
    """A loop steps through the words of all lines, and through a list of whether there are words."""
    words = tf.strings.split(lines_of_words(feeds, batch), result_type="RaggedTensor").to_tensor("")
    vectors = tf.gather(weights("table", 5, 5), tf.strings.to_hash_bucket_fast(tf.transpose(words), 5))
    are_there = tf.cast(tf.not_equal(tf.transpose(words), ""), tf.float64)[:, :, tf.newaxis]
    count = tf.shape(words)[1]
    lists = [tf.TensorArray(tf.float64, count).unstack(x) for x in (vectors, are_there)]
    lengths, kernel = tf.cast(tf.strings.length(tf.transpose(words)), tf.float64), weights("cell", 5, 5)

    def step(i: tf.Tensor, h: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
        more = lengths[i][:, tf.newaxis] if with_lengths else 0.0
        new, is_there = tf.tanh((lists[0].read(i) + more + h) @ kernel), lists[1].read(i)
        return i + 1, is_there * new + (1 - is_there) * h

    return tf.while_loop(lambda i, h: i < count, step, (0, tf.zeros([tf.shape(words)[0], 5], tf.float64)))[1]


def whole_steps(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Each step looks at the lengths of all words, so that the loop runs whole, and with it the list of divided words."""
    return steps(feeds, batch, True)


def pairs_of_words(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    words = tf.strings.split(lines_of_words(feeds, batch), result_type="RaggedTensor")
    pairs, splits = tf.raw_ops.StringNGrams(
        data=words.values, data_splits=words.row_splits, separator="_", ngram_widths=[1, 2], left_pad="", right_pad="",
        pad_width=0, preserve_short_sequences=False)
    numbers = tf.strings.to_hash_bucket_fast(tf.RaggedTensor.from_row_splits(pairs, splits).to_tensor(""), 5)
    return tf.reduce_sum(tf.gather(weights("table", 5, 5), numbers), 1)


def sparse(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Products with a sparse matrix, means over its rows, and its counts."""
    words = tf.string_split(lines_of_words(feeds, batch))
    numbers = tf.strings.to_hash_bucket_fast(words.values, 5)
    rows = tf.SparseTensor(words.indices, tf.cast(numbers + 1, tf.float64), tf.stack([words.dense_shape[0], 3]))
    filled = tf.sparse.fill_empty_rows(rows, 0.0)
    product = tf.sparse.sparse_dense_matmul(rows, np.arange(12.0).reshape(3, 4)) + tf.sparse.to_dense(filled[0])[:, :1]
    row, count = tf.cast(words.indices[:, 0], tf.int32), tf.cast(words.dense_shape[0], tf.int32)
    means = tf.sparse.segment_mean(weights("table", 5, 4), tf.cast(numbers, tf.int32), row, num_segments=count)
    found = [product, means]
    if hasattr(tf.raw_ops, "SparseBincount"):
        counts = tf.sparse.bincount(tf.SparseTensor(words.indices, numbers, words.dense_shape), minlength=5, maxlength=5, axis=-1)
        found.append(tf.cast(tf.sparse.to_dense(counts), tf.float64)[:, :4])
    return tf.concat(found, 1) @ weights("dense", 4 * len(found), 5)


def from_bytes(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Bytes, fields of text and pieces of strings, and what is computed row by row of their numbers."""
    lines = tf.placeholder(tf.string, [batch])
    feeds[lines] = np.array([f"{row},{row % 3}.5" for row in range(10, 10 + BATCH)], object)
    fields = tf.stack(tf.io.decode_csv(lines, [[0.0], [1.0]]), 1) / 10
    codes = tf.cast(tf.decode_raw(tf.strings.join([tf.strings.substr(lines, 0, 2), "ab"]), tf.uint8), tf.float32) / 100
    turned = tf.image.adjust_contrast(tf.image.adjust_hue(tf.reshape(tf.tile(codes[:, :3], [1, 4]), [-1, 2, 2, 3]), 0.1), 0.5)
    found = tf.concat([fields, tf.abs(tf.signal.rfft(codes)), tf.reshape(turned, [-1, 12])], 1)
    return tf.cast(found, tf.float64) @ weights("dense", 17, 5)


def own_crops(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    return _cropped(feeds, batch, lambda count: tf.range(count))


def crops_of_others(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """The crops are of other images than the example's own."""
    return _cropped(feeds, batch, lambda count: count - 1 - tf.range(count))


def _cropped(feeds: Dict, batch: Optional[int], order: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    images = tf.placeholder(tf.float32, [batch, 4, 4, 2])
    feeds[images] = np.random.RandomState(0).rand(BATCH, 4, 4, 2)
    count = tf.shape(images)[0]
    corners = tf.tile(tf.constant([[0.1, 0.0, 0.8, 0.9]]), [count, 1])
    found = tf.cast(tf.image.crop_and_resize(images, corners, order(count), (2, 2)), tf.float64)
    return tf.reshape(tf.nn.conv2d(found, weights("conv", 2, 2, 2, 5), [1, 1, 1, 1], "VALID"), [-1, 5])


def learned_crops(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Where the crops are, and of what, follows from variables."""
    images = tf.placeholder(tf.float32, [batch, 4, 4, 2])
    feeds[images] = np.random.RandomState(0).rand(BATCH, 4, 4, 2)
    features = tf.nn.conv2d(images, tf.cast(weights("conv", 1, 1, 2, 2), tf.float32), [1, 1, 1, 1], "SAME")
    corners = tf.sigmoid(tf.reduce_mean(features, [1, 2]) @ tf.cast(weights("corners", 2, 4), tf.float32))
    found = tf.image.crop_and_resize(features, corners, tf.range(tf.shape(images)[0]), (2, 2))
    return tf.reshape(tf.cast(found, tf.float64), [-1, 8]) @ weights("dense", 8, 5)


def drawn(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Nothing but the loss tells how many rows the op's result has."""
    images = tf.placeholder(tf.float32, [batch, 4, 4, 3])
    feeds[images] = np.random.RandomState(0).rand(BATCH, 4, 4, 3)
    found = tf.image.draw_bounding_boxes(images, images[:, :, :, 0])
    return tf.cast(tf.reduce_sum(found, [1, 2]), tf.float64) @ weights("dense", 3, 5)


def constant(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """The mini-batch is a constant of the graph."""
    return tf.tanh(np.random.RandomState(0).rand(BATCH, 6) @ weights("dense", 6, 5)) @ weights("hidden", 5, 5)


def pairs(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """The examples are in an input's second dimension."""
    both = tf.placeholder(tf.float64, [2, batch, 6])
    feeds[both] = np.random.RandomState(0).rand(2, BATCH, 6)
    first, second = tf.unstack(both)
    return tf.tanh(first @ weights("dense", 6, 5)) * tf.tanh(second @ weights("other", 6, 5))


def trained(entrance: Entrance, batch: Optional[int], plan: Optional[str]) -> Tuple[List[np.ndarray], str]:
    return entrances.trained(lambda feeds: entrance(feeds, batch), BATCH, batch, PLANS[plan] if plan else None)


@functools.lru_cache(maxsize=None)
def local(entrance: Entrance, batch: Optional[int]) -> List[np.ndarray]:
    return trained(entrance, batch, None)[0]


SOME = [(text, None, "data parallel"), (text, BATCH, "two stages"), (text, None, "nested"), (text, None, "called"),
        (text, None, "unequal"), (own_crops, None, "two stages"), (own_crops, BATCH, "data parallel"),
        (crops_of_others, None, "nested"), (crops_of_others, BATCH, "called"), (crops_of_others, None, "data parallel"),
        (drawn, None, "nested"), (drawn, None, "unequal"),
        (characters, None, "two stages"), (pairs_of_words, BATCH, "data parallel"), (sparse, None, "data parallel"),
        (sparse, BATCH, "called"), (from_bytes, None, "nested"), (steps, None, "data parallel"), (steps, BATCH, "nested"),
        (constant, BATCH, "two stages"), (constant, BATCH, "called"), (pairs, None, "nested"), (pairs, BATCH, "data parallel"),
        (whole_steps, None, "data parallel"), (learned_crops, None, "two stages"), (learned_crops, BATCH, "data parallel")]


@pytest.mark.half
@pytest.mark.parametrize("entrance, batch, plan", SOME, ids=lambda value: getattr(value, "__name__", str(value)))
def test_layers_behind_an_entrance_are_divided(entrance: Entrance, batch: Optional[int], plan: str) -> None:
    found, explained = trained(entrance, batch, plan)
    all_divided = entrance is not whole_steps
    assert (" 100% of the floating-point operations" in explained) == all_divided, explained
    assert ("once per mini-batch" in explained) == (entrance not in (own_crops, learned_crops, from_bytes, constant, pairs))
    tolerance = 1e-12 if entrance is not learned_crops else 1e-6  # TensorFlow has its gradients in float32 only
    for one, other in zip(found, local(entrance, batch)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
