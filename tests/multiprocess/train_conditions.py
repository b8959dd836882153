"""A script whose optimizer runs in a condition inside of another one, in every second step, over variables of two processes.

``python -m tests.multiprocess.train_conditions functional|switches``: it prints what it computes, which must be what one process
prints.  Adam keeps its powers of beta in one process, and the gradients are clipped by their common norm.  A moving average
follows from the forward pass of the first process alone.
"""
from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.multiprocess.train_parts import dense, show

RANK = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index")


def main(is_functional: bool) -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    if is_functional:
        tf.enable_control_flow_v2()
        tf.enable_resource_variables()
    else:
        tf.disable_control_flow_v2()
    wh.init({"num_micro_batch": 2}, cluster="2xcpu:1" if os.environ.get("TF_CONFIG") else "cpu:2")
    numbers = np.random.RandomState(0)
    x, y = numbers.randn(6, 6, 3), numbers.randn(6, 6, 2)
    features, labels = tf.placeholder(tf.float64, [None, 3]), tf.placeholder(tf.float64, [None, 2])
    with wh.replicate(1):
        average = tf.get_variable("average", [4], tf.float64, tf.zeros_initializer(), trainable=False)
        hidden = tf.tanh(dense(features, 3, 4, "one")) - average
        moved = tf.assign_sub(average, .1 * (average - tf.reduce_mean(hidden, 0)))
    with wh.replicate(1):
        loss = tf.reduce_mean(tf.square(dense(hidden, 4, 2, "two") - labels))
    step = tf.train.get_or_create_global_step()
    optimizer = tf.train.AdamOptimizer(.1)
    gradients, variables = zip(*optimizer.compute_gradients(loss))

    def apply() -> tf.Tensor:
        clipped, norm = tf.clip_by_global_norm(gradients, .5)
        with tf.control_dependencies([optimizer.apply_gradients(list(zip(clipped, variables)))]):
            return tf.identity(norm)

    def nothing() -> tf.Tensor:
        return tf.constant(0., tf.float64)

    norm = tf.cond(step < 4, lambda: tf.cond(tf.equal(step % 2, 0), apply, nothing), nothing)
    with tf.control_dependencies([norm, moved]):
        train = step.assign_add(1)
    slots: Any = [optimizer.get_slot(variable, name) for variable in variables for name in ("m", "v")]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for index in range(6):
            values = session.run([loss, norm, train], {features: x[index], labels: y[index]})
            show("step", *values[:2])
            if RANK in (index % 2, None):  # each process looks by itself, and finds what this step has left
                time.sleep(.3 if index < 4 else 0)
                show(f"variables {index}", *session.run([*variables, average]))
        show("slots", *session.run([*slots, *optimizer._get_beta_accumulators(), step]))


if __name__ == "__main__":
    main(sys.argv[1] == "functional")
