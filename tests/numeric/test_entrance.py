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
    yield
    wh.shutdown()


def text(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Words of lines, padded to the longest line."""
    lines, random = tf.placeholder(tf.string, [batch]), np.random.RandomState(0)
    feeds[lines] = np.array([" ".join(random.choice(list("abcd"), 1 + row % 3)) for row in range(BATCH)], object)
    words = tf.strings.split(lines, result_type="RaggedTensor").to_tensor("")
    found = tf.gather(weights("table", 5, 4), tf.strings.to_hash_bucket_fast(words, 5))
    hidden = tf.reshape(tf.reshape(found, [-1, 4]) @ weights("dense", 4, 5), [tf.shape(words)[0], tf.shape(words)[1], 5])
    return tf.reduce_sum(hidden, 1)


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


def decomposed(feeds: Dict, batch: Optional[int]) -> tf.Tensor:
    """Nothing but the loss tells how many rows the op's result has."""
    matrices = tf.placeholder(tf.float64, [batch, 3, 3])
    feeds[matrices] = np.random.RandomState(0).rand(BATCH, 3, 3)
    return tf.linalg.svd(matrices, compute_uv=False) @ weights("dense", 3, 5)


def trained(entrance: Entrance, batch: Optional[int], plan: Optional[str]) -> Tuple[List[np.ndarray], str]:
    return entrances.trained(lambda feeds: entrance(feeds, batch), BATCH, batch, PLANS[plan] if plan else None)


@functools.lru_cache(maxsize=None)
def local(entrance: Entrance, batch: Optional[int]) -> List[np.ndarray]:
    return trained(entrance, batch, None)[0]


SOME = [(text, None, "data parallel"), (text, BATCH, "two stages"), (text, None, "nested"), (text, None, "called"),
        (text, None, "unequal"), (own_crops, None, "two stages"), (own_crops, BATCH, "data parallel"),
        (crops_of_others, None, "nested"), (crops_of_others, BATCH, "called"), (crops_of_others, None, "data parallel"),
        (decomposed, None, "nested"), (decomposed, None, "unequal"),
        (learned_crops, None, "two stages"), (learned_crops, BATCH, "data parallel")]


@pytest.mark.parametrize("entrance, batch, plan", SOME, ids=lambda value: getattr(value, "__name__", str(value)))
def test_layers_behind_an_entrance_are_divided(entrance: Entrance, batch: Optional[int], plan: str) -> None:
    found, explained = trained(entrance, batch, plan)
    assert " 100% of the floating-point operations" in explained, explained
    assert ("once per mini-batch" in explained) == (entrance in (text, crops_of_others, decomposed))
    tolerance = 1e-12 if entrance is not learned_crops else 1e-6  # TensorFlow has its gradients in float32 only
    for one, other in zip(found, local(entrance, batch)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
