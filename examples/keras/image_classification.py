"""A convolutional network on handwritten digits, data parallel on four devices.

    python examples/keras/image_classification.py

Only the two lines with `wh` are ours. Batch normalisation takes the statistics of the whole mini-batch (`sync_batch_norm`), so
that the numbers are those of one device.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"sync_batch_norm": True}, cluster="cpu:4")  # before TensorFlow runs its first op

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def main() -> None:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = (digits.images[..., np.newaxis] / 16.0).astype("float32"), digits.target

    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10, activation="softmax"),
    ])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images[:1536], labels[:1536], batch_size=64, epochs=4, verbose=2, validation_data=(images[1536:], labels[1536:]))
    print(wh.explain())


if __name__ == "__main__":
    main()
