"""``wh.doctor`` on a function that trains, which TensorFlow's profiler traces."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from whale_tf.diagnosis.record import parse


@pytest.mark.slow
def test_function_with_an_input_that_is_slow(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    try:
        wh.doctor(9, path=str(path))
        first, second = tf.Variable(np.ones([6, 5])), tf.Variable(np.ones([5, 2]))

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with wh.replicate(1):
                    hidden = tf.matmul(x, first, name="one")
                with wh.replicate(1):
                    loss = tf.reduce_mean(tf.square(tf.matmul(hidden, second, name="two")))
            for variable, gradient in zip((first, second), tape.gradient(loss, (first, second))):
                variable.assign_sub(0.01 * gradient)
            return loss

        for _ in range(14):
            float(step(tf.constant(np.ones([8, 6]))))
            tf.py_function(lambda: __import__("time").sleep(0.03), [], [])
    finally:
        wh.shutdown()
    found = parse(str(path))
    process, = found.processes
    assert (process.steps, process.traced, found.step.batch) == (6, 3, 8)
    assert process.period_s - process.run_s > 0.025
    runs = {(op.name, op.device): op.runs for op in process.ops if op.is_known}
    assert runs["one", 0] == 2 and runs["two", 1] == 2 and ("one", 1) not in runs
