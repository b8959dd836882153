"""Stages with different numbers of replicas: a small first stage on one device, a large second one on three.

    python examples/unequal_replicas.py

Between them every micro-batch is split into three parts on the way forward, and the gradients are put together on the
way back (DAPPLE, Fig. 9).
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
    wh.init(wh.Config({"num_micro_batch": 4}), cluster="cpu:4")

    config = mlp.MlpConfig(hidden=96)
    inputs = mlp.inputs(config, batch_size=96)
    with wh.replicate(1):
        x = mlp.hidden_layer(inputs.images, config, name="layer_0")
    with wh.replicate(3):
        x = mlp.hidden_layer(x, config, name="layer_1")
        x = mlp.hidden_layer(x, config, name="layer_2")
        loss = layers.mean_cross_entropy(mlp.head(x, config), inputs.labels)

    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss)
    train(train_op, loss, inputs, data.batches(data.digit_features(), 96), steps=30)
    print(wh.explain())


if __name__ == "__main__":
    main()
