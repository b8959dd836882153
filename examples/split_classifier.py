"""Data parallel features and a classifier that is divided over the same devices (Whale, Example 2).

    python examples/split_classifier.py

The classifier's weights, gradients and optimizer slots lie on the devices in parts. ``patterns.force`` takes Whale's SP1,
``column``. For the ten classes of this small model SP2, ``row``, exchanges less; for the 100,000 of the paper whale_tf takes
SP1 by itself, with a loss over divided classes, for which no logits are gathered.
"""
from __future__ import annotations

import os
import sys

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import whale_tf as wh
from examples.training import train
from models import data, layers, mlp


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init(wh.Config({"patterns.force": {"head": "column"}}), cluster="cpu:4")
    total_gpus = wh.total_gpus()

    config = mlp.MlpConfig(hidden=96)
    inputs = mlp.inputs(config, batch_size=96)
    with wh.replicate(total_gpus):
        features = mlp.hidden_layer(inputs.images, config, name="layer_0")
    with wh.split(total_gpus):
        logits = mlp.head(features, config)
        loss = layers.mean_cross_entropy(logits, inputs.labels)

    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss)
    train(train_op, loss, inputs, data.batches(data.digit_features(), 96), steps=30)
    print(wh.explain())


if __name__ == "__main__":
    main()
