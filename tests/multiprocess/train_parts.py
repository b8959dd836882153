"""A script with a Session as people write it: two epochs of an iterator, and runs that do other things than train.

``python -m tests.multiprocess.train_parts [STEPS] [ALONE] [OTHER]``: two stages on three devices; each of two processes runs
its part, on one device or two.  It prints what it computes, which must be what one process prints.  ``STEPS``: on four devices,
so that four processes run two steps side by side.  ``ALONE``: process 0 alone fetches more beside a training step.  ``OTHER``:
the processes shuffle differently.
"""
from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh

RANK = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)

CPU = {"type": "CPU"}
UNEQUAL = {"name": "unequal", "nodes": [{"devices": [CPU] * count, "links": "default", "nic": {"bandwidth_gbits_per_s": 10}}
                                        for count in (1, 2)]}


def main(has_steps: bool, is_alone: bool, is_other: bool) -> None:
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.set_random_seed(1)
    cluster = ("4xcpu:1" if has_steps else UNEQUAL) if os.environ.get("TF_CONFIG") else f"cpu:{3 + has_steps}"
    wh.init({"num_micro_batch": 2, "io.nested_batch": "divide", "communication.start_timeout_s": 5 if is_alone else 300},
            cluster=cluster)
    numbers = np.random.RandomState(0)
    x, y = numbers.randn(12, 3), numbers.randn(12, 2)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(12, 1 + is_other * RANK).batch(6 if has_steps else 4)
    iterator = tf.data.make_initializable_iterator(data)
    features, labels = iterator.get_next()
    features = tf.placeholder_with_default(features, [None, 3])
    with wh.replicate(1):
        hidden = tf.tanh(dense(features, 3, 4, "one"))
    with wh.replicate(1 if has_steps else 2):
        result = dense(hidden, 4, 2, "two")
        loss = tf.reduce_mean(tf.square(result - labels))
    step = tf.train.get_or_create_global_step()
    update = tf.train.MomentumOptimizer(tf.train.exponential_decay(.1, step, 2, .5), .9).minimize(loss, global_step=step)
    average = tf.train.ExponentialMovingAverage(.5)
    with tf.control_dependencies([update]):
        train = average.apply(tf.trainable_variables())
    averages = [average.average(variable) for variable in tf.trainable_variables()]
    summary = tf.summary.merge([tf.summary.scalar("loss", loss), tf.summary.scalar("mean", tf.reduce_mean(result))])
    halved = [variable.assign(.5 * variable) for variable in tf.trainable_variables()]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run(iterator.initializer)
            while True:
                try:
                    values = session.run([loss, result, step, train])[:3]
                except tf.errors.OutOfRangeError:
                    break
                show("step", *values)
            if RANK % 3 == 0:  # the others do not look
                show("result", session.run(result, {features: x[:2]}))
            show("averages", *session.run(averages))
            session.run(halved)
            show("halved", *session.run(tf.trainable_variables()))
        if is_alone:
            session.run(iterator.initializer)
            session.run([train, result] if RANK == 0 else [train])
        session.run(iterator.initializer)
        if RANK == 0:
            text = session.run(summary)
            show("summary", *(value.simple_value for value in tf.Summary.FromString(text).value))
        tf.add_to_collection("later", tf.norm(tf.trainable_variables()[0]))
        show("later", session.run(tf.get_collection("later")[0]))
        if RANK == 1:  # it waits for process 0 no longer than until that one waits for it
            tf.train.Saver().save(session, os.environ["FOLDER"] + "/alone")
        time.sleep(RANK == 0)  # process 0 is late
        path = tf.train.Saver().save(session, os.environ["FOLDER"] + "/model")
        assert tf.train.checkpoint_exists(path), "process 0 has written it"
        tf.train.Saver().restore(session, path)
        show("restored", *session.run(tf.trainable_variables()))


def dense(x: tf.Tensor, inputs: int, units: int, name: str) -> tf.Tensor:
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [inputs, units], tf.float64, tf.glorot_uniform_initializer(seed=units))
        return tf.matmul(x, kernel) + tf.get_variable("bias", [units], tf.float64, tf.zeros_initializer())


def show(what: str, *values: object) -> None:
    print(f"[{what}]", *(np.array2string(np.asarray(value), precision=10).replace("\n", "") for value in values), flush=True)


if __name__ == "__main__":
    main("STEPS" in sys.argv, "ALONE" in sys.argv, "OTHER" in sys.argv)
