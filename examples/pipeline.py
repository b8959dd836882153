"""A pipeline of four stages with eight micro-batches: a BERT-style encoder on the text of Python's standard library.

    python examples/pipeline.py

The schedule is 1F1B: a stage starts backward work as soon as it can, so it never holds more than four micro-batches.
"""
from __future__ import annotations

import os
import sys

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import whale_tf as wh
from examples.training import train
from models import bert, data


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init(wh.Config({"num_micro_batch": 8}), cluster="cpu:4")

    config = bert.BertConfig.tiny(layers=4)
    inputs = bert.inputs(config, batch_size=32)
    with wh.replicate(1):
        x, table = bert.embed(inputs.tokens, config, inputs.segments)
        x = bert.encoder_layer(x, config, name="layer_0")
    with wh.replicate(1):
        x = bert.encoder_layer(x, config, name="layer_1")
    with wh.replicate(1):
        x = bert.encoder_layer(x, config, name="layer_2")
    with wh.replicate(1):
        x = bert.encoder_layer(x, config, name="layer_3")
        loss = bert.mlm_loss(bert.mlm_head(x, inputs.positions, table, config), inputs)

    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss)
    examples = data.masked_lm_examples(512, config.seq, config.predictions)
    train(train_op, loss, inputs, data.batches(examples, 32), steps=30)
    print(wh.explain())


if __name__ == "__main__":
    main()
