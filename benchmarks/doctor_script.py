"""A training script with a fault: ``python benchmarks/doctor_script.py '{"fault": "stage", "batch": 512}'`` (see
:mod:`benchmarks.doctor`)."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, Iterator, NamedTuple, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh

STEPS, BLOCK = 35, 5
UNMEASURED = 5  # first steps


class Settings(NamedTuple):
    """Attributes:
    fault: a name in :data:`benchmarks.doctor.FAULTS`, or "" without it.
    model: ``pipeline`` on two devices, or ``replicas``.
    batch, width, layers: sizes.
    strength: of the fault: seconds, repetitions, or a share of the time.
    has_section: whether the model has what ``undivided`` or ``host_copies`` makes slow: without the fault, half of the columns of
        a product of all examples, or the function's argument instead of its value.
    """

    fault: str = ""
    model: str = "pipeline"
    batch: int = 512
    width: int = 512
    layers: int = 12
    micro_batches: int = 4
    strength: float = 0.0
    has_section: bool = False


def examples(given: Settings) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    random = np.random.RandomState(0)
    x, y = (random.randn(given.batch, given.width).astype("float32") for _ in range(2))
    while True:
        if given.fault == "slow_input":
            time.sleep(given.strength)
        yield x, y


def dense(x: Any, name: str) -> Any:
    start, width = tf.random_normal_initializer(stddev=0.04, seed=1), int(x.shape[1])
    return tf.tanh(tf.matmul(x, tf.get_variable(name, [width, width], initializer=start)))


def between(h: Any, given: Settings) -> Any:
    """What the model computes between its halves."""
    if given.has_section and given.model == "pipeline":
        repeats = int(given.strength)

        def sorted_rows(values: np.ndarray) -> np.ndarray:
            return np.stack([np.sort(np.tile(row, repeats))[::repeats] for row in values]).astype("float32")

        made = wh.batch_axis(tf.py_func(sorted_rows, [h], tf.float32), 0) if given.fault else h
        made.set_shape(h.shape)
        return h + 1e-3 * tf.stop_gradient(made)
    if given.has_section:  # products with the covariance of all examples, or with half of its columns
        width = given.width if given.fault else given.width // 2
        value = tf.matmul(h, h[:, :width], transpose_a=True) / given.batch
        fixed = tf.constant(np.random.RandomState(1).randn(given.width, given.width).astype("float32") / given.width ** 0.5)
        for _ in range(int(given.strength)):
            value = tf.tanh(tf.matmul(fixed, value))
        return h + 1e-3 * tf.reduce_mean(value)
    return h


def slowed(share: float, seconds: float = 0.04) -> None:
    """Stops this process for a share of the time."""
    text = ("import os, signal, sys, time\nprocess = int(sys.argv[1])\nwhile os.getppid() == process:\n"
            f"    os.kill(process, signal.SIGSTOP); time.sleep({seconds * share}); os.kill(process, signal.SIGCONT)\n"
            f"    time.sleep({seconds * (1 - share)})\n")
    subprocess.Popen([sys.executable, "-c", text, str(os.getpid())])


class Gate:
    """Lets two scripts run in turns: each says that it has made some steps, and waits until it may go on."""

    def __init__(self, path: str) -> None:
        self._said = open(path + ".said", "w", encoding="utf8") if path else None
        self._heard = open(path + ".heard", encoding="utf8") if path else None

    def wait(self) -> None:
        if self._said is not None and self._heard is not None:
            self._said.write("ready\n")
            self._said.flush()
            self._heard.readline()


def main(given: Settings) -> None:
    rank = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)
    is_job = "TF_CONFIG" in os.environ
    if is_job and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    if given.fault == "slow_worker" and rank == 1:
        slowed(given.strength)
    wh.init({"num_micro_batch": given.micro_batches, "emit": "inline"} if given.model == "pipeline" else {},
            **({} if is_job else {"cluster": "cpu:2"}))
    if "WHALE_DOCTOR" not in os.environ and os.environ.get("FAULT_RECORD"):
        wh.doctor(STEPS - UNMEASURED, path=os.environ["FAULT_RECORD"])
    tf.disable_eager_execution()
    first = given.layers - 1 if given.fault == "stage" else given.layers // 2
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_generator(lambda: examples(given), (tf.float32, tf.float32),
                                                 ([given.batch, given.width], [given.batch, given.width]))
        options = tf.data.Options()
        if hasattr(options, "autotune"):  # would fetch elements while the other script has its turn
            options.autotune.enabled = False
        iterator = tf.data.make_initializable_iterator(dataset.with_options(options))
        h, y = iterator.get_next()
        halves = [range(first), range(first, given.layers)] if given.model == "pipeline" else [range(given.layers)]
        for half in halves:
            with wh.replicate(1 if given.model == "pipeline" else wh.total_devices()):
                for number in half:
                    h = dense(h, f"w{number}")
                if half is halves[0]:
                    h = between(h, given)
                if half is halves[-1]:
                    loss = tf.reduce_mean(tf.square(h - y))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss)
        threads = 1 if is_job else 2
        config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=threads)
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), iterator.initializer])
            times, gate = [], Gate(os.environ.get("FAULT_GATE", "") if rank == 0 else "")
            for number in range(STEPS):
                if number % BLOCK == 0:
                    gate.wait()
                began = time.perf_counter()
                session.run([loss, train])
                times.append(time.perf_counter() - began)
            gate.wait()
    print("seconds", float(np.median(times[UNMEASURED:])), flush=True)


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
