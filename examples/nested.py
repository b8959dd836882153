"""Nested data parallelism: two stages ask for two devices, four are there, so two such pipelines run side by side.

    python examples/nested.py

Data comes from a tf.data iterator: each pipeline takes a mini-batch of its own in every step.
"""
from __future__ import annotations

import itertools
import os
import sys

import tensorflow.compat.v1 as tf

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import whale_tf as wh
from models import bert, data


def main() -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    wh.init(wh.Config({"num_micro_batch": 4}), cluster="cpu:4")

    config = bert.BertConfig.tiny(layers=2)
    examples = data.masked_lm_examples(512, config.seq, config.predictions)
    batch = tf.data.make_one_shot_iterator(data.dataset(examples, batch_size=16, seed=1)).get_next()
    with wh.replicate(1):
        x, table = bert.embed(batch.tokens, config, batch.segments)
        x = bert.encoder_layer(x, config, name="layer_0")
    with wh.replicate(1):
        x = bert.encoder_layer(x, config, name="layer_1")
        loss = bert.mlm_loss(bert.mlm_head(x, batch.positions, table, config), batch)

    step = tf.train.get_or_create_global_step()
    train_op = tf.train.AdamOptimizer(1e-2, epsilon=1e-6).minimize(loss, global_step=step)
    hooks = [tf.train.StopAtStepHook(last_step=30)]
    with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
        for number in itertools.count(1):
            value = session.run([loss, train_op])[0]
            if number % 5 == 0 or number == 1:
                print(f"step {number:3d}  loss {value:.4f}")
            if session.should_stop():
                break
    print(wh.explain())


if __name__ == "__main__":
    main()
