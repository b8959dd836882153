"""An embedding of handwritten digits in which equal digits are near, from pairs; data parallel on four devices.

    python examples/keras/metric_learning.py

The second image of every other pair of the mini-batch is a negative example (N-pairs, Sohn 2016). The network runs on four parts
of the mini-batch; the matrix of all similarities, which no part can compute, is computed once, from the embeddings of all.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init(cluster="cpu:4")  # before TensorFlow runs its first op

from typing import Any, Tuple  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers, ops  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def pairs(images: np.ndarray, labels: np.ndarray, count: int) -> Tuple[np.ndarray, ...]:
    """Images, other images of the same digit, and that digit."""
    rng = np.random.RandomState(0)
    anchors = rng.randint(0, len(images), count)
    same = np.array([rng.choice(np.flatnonzero(labels == labels[i])) for i in anchors])
    return images[anchors], images[same], labels[anchors]


def n_pairs(digits: Any, embedded: Any) -> Any:
    """Cross-entropy of finding an anchor's own pair among all of the mini-batch; pairs of the same digit are right, too."""
    digits = ops.reshape(digits, (-1,))
    similarities = ops.matmul(embedded[:, 0], ops.transpose(embedded[:, 1])) / 0.1  # [examples, examples]
    right = ops.cast(ops.equal(digits[:, None], digits[None]), "float32")
    return ops.categorical_crossentropy(right / ops.sum(right, axis=1, keepdims=True), similarities, from_logits=True)


def nearest(embedded: np.ndarray, labels: np.ndarray) -> float:
    """How often the nearest other image is of the same digit."""
    distances = ((embedded[:, None] - embedded[None]) ** 2).sum(2) + 1e9 * np.eye(len(embedded))
    return float((labels[distances.argmin(1)] == labels).mean())


def main() -> None:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype("float32"), digits.target

    network = keras.Sequential([
        keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(16), layers.UnitNormalization()])
    inputs = [keras.Input((64,), name=name) for name in ("anchor", "same")]
    model = keras.Model(inputs, ops.stack([network(image) for image in inputs], axis=1))
    model.compile(keras.optimizers.Adam(0.003), n_pairs)

    print(f"nearest neighbours of the same digit before: {nearest(network.predict(images[1500:], verbose=0), labels[1500:]):.3f}")
    *examples, classes = pairs(images[:1500], labels[:1500], 2048)
    model.fit(list(examples), classes, batch_size=64, epochs=5, verbose=2)
    print(f"and after: {nearest(network.predict(images[1500:], verbose=0), labels[1500:]):.3f}")
    print(wh.explain())


if __name__ == "__main__":
    main()
