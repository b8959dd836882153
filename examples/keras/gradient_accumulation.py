"""Batches of 256 in eight parts, on one device: the numbers of whole batches, in an eighth of the memory of activations.

    python examples/keras/gradient_accumulation.py

`num_micro_batch` adds up the gradients inside of one step. Keras' metrics, callbacks and counts of steps stay those of whole
batches. The script trains the same model once more without whale_tf and compares.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"num_micro_batch": 8}, cluster="cpu:1")

from typing import Any, List  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def trained() -> Any:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = (digits.data[:1536] / 16.0).astype("float32"), digits.target[:1536]
    model = keras.Sequential([keras.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images, labels, batch_size=256, epochs=5, verbose=2)
    return model


def main() -> None:
    accumulated: List[np.ndarray] = trained().get_weights()
    print(wh.explain())
    wh.shutdown()
    whole = trained().get_weights()
    difference = max(np.abs(one - other).max() for one, other in zip(accumulated, whole))
    print(f"largest difference of any weight after 30 steps: {difference:.1e}")


if __name__ == "__main__":
    main()
