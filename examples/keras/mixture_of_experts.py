"""A classifier whose hidden layer is eight experts, of which each example takes two; the experts are divided over four devices.

    python examples/keras/mixture_of_experts.py

Everything else is replicated on the same devices: each computes its share of the mini-batch, and for the experts all examples.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init(cluster="cpu:4")  # before TensorFlow runs its first op

from typing import Any  # noqa: E402

import keras  # noqa: E402
from keras import layers, ops  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

EXPERTS, WIDTH, CHOSEN = 8, 24, 2


class Experts(layers.Layer):
    """The outputs of the experts that the gate rates highest, weighted by its probabilities (after Shazeer et al. 2017)."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(shape[-1], EXPERTS), name="gate")
        self.kernel = self.add_weight(shape=(EXPERTS, shape[-1], WIDTH), name="kernel")
        self.bias = self.add_weight(shape=(EXPERTS, WIDTH), initializer="zeros", name="bias")

    def call(self, x: Any) -> Any:
        logits = ops.matmul(x, self.gate)
        lowest = ops.min(ops.top_k(logits, CHOSEN)[0], axis=1, keepdims=True)
        gates = ops.softmax(ops.where(logits >= lowest, logits, -1e9))
        hidden = ops.relu(ops.einsum("bi,eij->bej", x, self.kernel) + self.bias)
        return ops.einsum("be,bej->bj", gates, hidden)


def main() -> None:
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype("float32"), digits.target

    wh.set_default_strategy(wh.replicate(4))
    inputs = keras.Input((64,))
    with wh.split(4):
        x = Experts()(inputs)
    outputs = layers.Dense(10, activation="softmax")(layers.LayerNormalization()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images[:1536], labels[:1536], batch_size=64, epochs=5, verbose=2, validation_data=(images[1536:], labels[1536:]))
    print(wh.explain())


if __name__ == "__main__":
    main()
