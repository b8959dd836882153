"""A training script with a fault: ``python benchmarks/doctor_script.py FAULT [MICRO_BATCHES]`` (see :mod:`benchmarks.doctor`)."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, Iterator, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh

STEPS = 25
BATCH, WIDTH, LAYERS = 512, 512, 12
SLEEP_S = 0.15  # of the slow input, for each mini-batch


def examples(sleep_s: float) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    random = np.random.RandomState(0)
    x, y = random.randn(BATCH, WIDTH).astype("float32"), random.randn(BATCH, WIDTH).astype("float32")
    while True:
        if sleep_s:
            time.sleep(sleep_s)
        yield x, y


def dense(x: Any, name: str) -> Any:
    start = tf.random_normal_initializer(stddev=0.04, seed=1)
    return tf.tanh(tf.matmul(x, tf.get_variable(name, [int(x.shape[1]), WIDTH], initializer=start)))


def doubled(values: np.ndarray) -> np.ndarray:
    """What a Python function does to a tensor on the host, row by row."""
    return np.stack([np.sort(np.tile(row, 8))[::8] for row in values]).astype("float32")


def between(h: Any, fault: str) -> Any:
    """What the model computes between its halves."""
    if fault == "host_copies":
        made = wh.batch_axis(tf.py_func(doubled, [h], tf.float32), 0)
        made.set_shape(h.shape)
        return h + 1e-3 * tf.stop_gradient(made)
    if fault in ("undivided", "undivided_fixed"):  # products of the covariance of all examples
        value = tf.matmul(h, h, transpose_a=True) / BATCH
        for _ in range(12 if fault == "undivided" else 6):
            value = tf.tanh(tf.matmul(value, value))
        return h + 1e-3 * tf.reduce_mean(value)
    return h


def slowed(seconds: float = 0.01) -> None:
    """Stops this process half of the time."""
    text = ("import os, signal, sys, time\nprocess = int(sys.argv[1])\nwhile os.getppid() == process:\n"
            "    os.kill(process, signal.SIGSTOP); time.sleep({0}); os.kill(process, signal.SIGCONT); time.sleep({0})\n")
    subprocess.Popen([sys.executable, "-c", text.format(seconds), str(os.getpid())])


def main(fault: str, count: int) -> None:
    pipeline = fault in ("none", "stage", "host_copies", "slow_input")
    rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
    if fault == "slow_worker" and rank == 1:
        slowed()
    wh.init({"num_micro_batch": count, "emit": "inline"} if pipeline else {}, **(
        {} if "WHALE_CLUSTER" in os.environ else {"cluster": "cpu:2"}))
    if "WHALE_DOCTOR" not in os.environ and os.environ.get("FAULT_RECORD"):
        wh.doctor(STEPS - 5, path=os.environ["FAULT_RECORD"])
    tf.disable_eager_execution()
    first = LAYERS - 1 if fault == "stage" else LAYERS // 2
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_generator(
            lambda: examples(SLEEP_S if fault == "slow_input" else 0.0), (tf.float32, tf.float32),
            ([BATCH, WIDTH], [BATCH, WIDTH]))
        iterator = tf.data.make_initializable_iterator(dataset)
        x, y = iterator.get_next()
        if pipeline:
            with wh.replicate(1):
                h = x
                for number in range(first):
                    h = dense(h, f"w{number}")
                h = between(h, fault)
            with wh.replicate(1):
                for number in range(first, LAYERS):
                    h = dense(h, f"w{number}")
                loss = tf.reduce_mean(tf.square(h - y))
        else:
            with wh.replicate(wh.total_devices()):
                h = x
                for number in range(LAYERS):
                    h = dense(h, f"w{number}")
                h = between(h, fault)
                loss = tf.reduce_mean(tf.square(h - y))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            times = []
            for _ in range(STEPS):
                began = time.perf_counter()
                session.run([loss, train])
                times.append(time.perf_counter() - began)
    print("seconds", float(np.median(times[5:])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4)
