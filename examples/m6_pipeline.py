"""M6 as a pipeline of eight stages with 35 micro-batches (Whale, Example 4), in a small size.

    python examples/m6_pipeline.py

M6 reads an image and a text and writes another text. The ten-billion-parameter configuration of the paper is
`models.m6.M6Config.m6_10b()`; the lines for whale_tf are the same.
"""
from __future__ import annotations

import os
import sys

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("WHALE_CLUSTER", "cpu:8")  # eight logical devices, so that the example runs anywhere

import whale_tf as wh
from examples.training import train
from models import data, m6


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)

    wh.init(wh.Config({
        "num_micro_batch": 35,
        "num_task_graph": 8}))
    # Define M6 model.
    config = m6.M6Config(encoder_layers=1, decoder_layers=1, source=8, target=4)
    inputs = m6.inputs(config, batch_size=70)
    loss = m6.build(inputs, config).loss

    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss)
    examples = data.digit_captions(config.source, config.target)
    train(train_op, loss, inputs, data.batches(examples, 70), steps=10)
    print(wh.explain())


if __name__ == "__main__":
    main()
