"""An embedding of handwritten digits in which equal digits are near, from triplets; data parallel on four devices.

    python examples/keras/metric_learning.py

The loss of a triplet needs no other triplet, so the mini-batch divides. One network embeds all three images.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init(cluster="cpu:4")  # before TensorFlow runs its first op

from typing import Tuple  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers, ops  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def triplets(images: np.ndarray, labels: np.ndarray, count: int) -> Tuple[np.ndarray, ...]:
    """Anchors, other images of the same digit, and images of other digits."""
    rng = np.random.RandomState(0)
    anchors = rng.randint(0, len(images), count)
    same = np.array([rng.choice(np.flatnonzero(labels == labels[i])) for i in anchors])
    other = np.array([rng.choice(np.flatnonzero(labels != labels[i])) for i in anchors])
    return images[anchors], images[same], images[other]


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
    inputs = [keras.Input((64,), name=name) for name in ("anchor", "same", "other")]
    anchor, same, other = [network(image) for image in inputs]
    near, far = ops.sum((anchor - same) ** 2, axis=1), ops.sum((anchor - other) ** 2, axis=1)
    model = keras.Model(inputs, ops.stack([near, far], axis=1))
    model.compile(keras.optimizers.Adam(0.003), lambda _, distances: ops.relu(0.5 + distances[:, 0] - distances[:, 1]))

    print(f"nearest neighbours of the same digit before: {nearest(network.predict(images[1500:], verbose=0), labels[1500:]):.3f}")
    examples = triplets(images[:1500], labels[:1500], 2048)
    model.fit(list(examples), np.zeros((2048, 2), "float32"), batch_size=64, epochs=5, verbose=2)
    print(f"and after: {nearest(network.predict(images[1500:], verbose=0), labels[1500:]):.3f}")
    print(wh.explain())


if __name__ == "__main__":
    main()
