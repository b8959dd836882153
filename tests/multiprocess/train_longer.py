"""Two processes keep variables for each other, and process 0 makes more steps than process 1.

``python -m tests.multiprocess.train_longer zero|parts``, in a job of two processes; zero: each updates half of the
variables; parts: each has a stage.
"""
from __future__ import annotations

import json
import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh

tf.disable_v2_behavior()
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
ZERO = sys.argv[1] == "zero"
STEPS = 3


def main() -> None:
    wh.init({"zero": "v1"} if ZERO else {"num_micro_batch": 2}, cluster="2xcpu:1")
    value = x = tf.placeholder(tf.float64, [None, 8], name="x")
    for name in ("first", "second"):
        with wh.replicate(None if ZERO else 1):
            value = tf.tanh(tf.matmul(value, tf.get_variable(name, [8, 8], tf.float64)))
            loss = tf.reduce_mean(tf.square(value))
    train = tf.train.AdamOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for step in range(STEPS + 2 * (RANK == 0)):
            print("step", step, session.run([train, loss], {x: np.ones([8, 8])})[1], flush=True)


if __name__ == "__main__":
    main()
