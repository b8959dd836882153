"""Data parallelism: a residual network on handwritten digits, on two devices.

    python examples/data_parallel.py

Each device trains on half of the mini-batch; the gradients are summed before every update. Batch normalisation uses
each device's own half, as everywhere in data parallelism, and ``wh.explain()`` says so; with
``{"sync_batch_norm": True}`` the result is that of one device.
"""
from __future__ import annotations

import os
import sys

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import whale_tf as wh
from examples.training import train
from models import data, resnet


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init(cluster="cpu:2")

    config = resnet.ResnetConfig.tiny()
    inputs = resnet.inputs(config, batch_size=64)
    with wh.replicate():  # without a number: one replica on every device
        loss = resnet.build(inputs, config).loss

    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
    train(train_op, loss, inputs, data.batches(data.digit_examples(), 64), steps=30)
    print(wh.explain())


if __name__ == "__main__":
    main()
