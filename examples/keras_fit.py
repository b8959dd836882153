"""A Keras model trained by `fit`, as a pipeline of two stages, twice (TensorFlow 2.16 and later; no download).

    python examples/keras_fit.py
    python examples/keras_fit.py step.svg       draws the step, too

Only the lines with `wh` are not in the script for one device. Metrics, validation, callbacks and saved models are the local ones.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import whale_tf as wh

wh.init({"num_micro_batch": 4}, cluster="cpu:4")  # before TensorFlow runs its first op: it makes logical CPU devices

import keras  # noqa: E402
import numpy as np  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402


def main() -> None:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = (digits.images[..., np.newaxis] / 16.0).astype("float32"), digits.target

    inputs = keras.Input((8, 8, 1))
    with wh.replicate(1):
        x = keras.layers.Conv2D(16, 3, activation="relu", padding="same")(inputs)
        x = keras.layers.MaxPooling2D()(x)
    with wh.replicate(1):
        x = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(x))
        outputs = keras.layers.Dense(10, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])

    history = model.fit(images[:1500], labels[:1500], batch_size=60, epochs=6, verbose=0,
                        validation_data=(images[1500:], labels[1500:])).history
    for loss, accuracy in zip(history["loss"], history["val_accuracy"]):
        print(f"loss {loss:.4f}  validation accuracy {accuracy:.3f}")
    print(wh.explain())
    if len(sys.argv) > 1:
        wh.draw_program(sys.argv[1])


if __name__ == "__main__":
    main()
