"""A transformer that predicts the next byte of Python's own source text: two pipelines of two stages.

    python examples/keras/text_transformer.py

The blocks of the first half are on one device and those of the second half on another; four micro-batches keep both busy. Four
devices are twice as many as the stages ask for, so two such pipelines divide the mini-batch.
"""
from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import whale_tf as wh

wh.init({"num_micro_batch": 4}, cluster="cpu:4")  # before TensorFlow runs its first op

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from models.data import BYTE_VOCAB, language_model_examples  # noqa: E402

LENGTH, WIDTH = 32, 32


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    attended = layers.MultiHeadAttention(num_heads=4, key_dim=8)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(layers.Add()([x, attended]))
    hidden = layers.Dense(2 * WIDTH, activation="gelu")(x)
    return layers.LayerNormalization()(layers.Add()([x, layers.Dense(WIDTH)(hidden)]))


def main() -> None:
    keras.utils.set_random_seed(0)
    text = language_model_examples(1024, LENGTH)

    tokens, positions = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    with wh.replicate(1):
        x = layers.Embedding(BYTE_VOCAB, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(positions)
        x = block(x)
    with wh.replicate(1):
        outputs = layers.Dense(BYTE_VOCAB)(block(x))
    model = keras.Model([tokens, positions], outputs)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.005), entropy, metrics=["accuracy"])
    places = np.tile(np.arange(LENGTH, dtype="int32"), (len(text.tokens), 1))
    model.fit([text.tokens, places], text.labels, batch_size=64, epochs=4, verbose=2)
    print(wh.explain())


if __name__ == "__main__":
    main()
