"""An automatic pipeline: the model has no annotation, whale_tf divides it (Whale, Example 3).

    python examples/auto_pipeline.py

Where a cut is cheap and what each part costs is found from the graph; `wh.explain()` shows the two TaskGraphs.
"""
from __future__ import annotations

import os
import sys

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("WHALE_CLUSTER", "cpu:2")  # two logical devices, so that the example runs anywhere

import whale_tf as wh
from examples.training import train
from models import bert, data


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)

    wh.init(wh.Config({"num_task_graph":2,
                       "num_micro_batch":4,"auto_parallel":True}))
    config = bert.BertConfig.tiny(layers=4)
    inputs = bert.inputs(config, batch_size=32)
    loss = bert.build(inputs, config).loss

    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss)
    examples = data.masked_lm_examples(512, config.seq, config.predictions)
    train(train_op, loss, inputs, data.batches(examples, 32), steps=30)
    print(wh.explain())


if __name__ == "__main__":
    main()
