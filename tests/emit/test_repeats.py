"""Copies of cheap ops in the processes that read them, in graphs of TensorFlow."""
from __future__ import annotations

from typing import Any, Callable, Set

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from whale_tf.cluster import process_of
from whale_tf.emit.repeats import MOST_ELEMENTS, repeat_where_read

FIRST, SECOND = ("/job:worker/replica:0/task:{}/device:CPU:0".format(task) for task in range(2))


def copied(build: Callable[[Any, Any], Any]) -> Set[str]:
    """Types of the ops that the second process gets copies of.  It reads what ``build`` makes in the first process, of a batch
    that both have and a value of the first process."""
    with tf.Graph().as_default() as graph:
        batch = tf.placeholder(tf.float32, [8, 4], "batch")
        with tf.device(FIRST):
            found = build(batch, tf.matmul(batch, tf.ones([4, 4]), name="value"))
        with tf.device(SECOND):
            read = tf.identity(found, "read")
        ops = graph.get_operations()
        repeat_where_read(graph, ops, ops, lambda op: process_of(op.device), range(2), "repeated")
        new = [op for op in graph.get_operations() if op.name.startswith("repeated/")]
        assert all(op.device == SECOND for op in new)
        assert (read.op.inputs[0].op in new) == bool(new)
        return {op.type for op in new}


@pytest.mark.parametrize("build, expected", [
    (lambda batch, value: tf.nn.relu(batch * 2.0), {"Const", "Mul", "Relu"}),
    (lambda batch, value: tf.one_hot(tf.cast(batch[:, 0], tf.int32), 1000), {"Const", "OneHot"}),  # of the numbers that are sent
    (lambda batch, value: tf.tile(tf.reduce_sum(value, 1, keepdims=True), [1, 100000]), {"Const", "Tile"}),
    (lambda batch, value: tf.nn.relu(value), set()),  # a message either way
    (lambda batch, value: tf.matmul(batch, batch, transpose_b=True), set()),  # not cheap
    (lambda batch, value: tf.random.uniform([8]), set()),  # other numbers in each process
    (lambda batch, value: tf.argmax(batch, 1), set()),  # a decision
    (lambda batch, value: tf.greater(tf.reduce_mean(batch), 0.5), set()),
    (lambda batch, value: tf.constant(np.zeros(MOST_ELEMENTS + 1)), set()),  # would be in the graph twice
    (lambda batch, value: tf.print(batch) and tf.strings.as_string(batch), set()),
])
def test_copies(build: Callable[[Any, Any], Any], expected: Set[str]) -> None:
    assert copied(build) == expected


def test_numbers_stay() -> None:
    """What the second process reads is computed from the other part of the sum."""
    with tf.Graph().as_default() as graph:
        with tf.device(FIRST):
            one = tf.matmul(tf.eye(3), tf.eye(3))
        with tf.device(SECOND):
            other = tf.matmul(tf.ones([3, 3]), tf.eye(3))
        with tf.device(FIRST):
            root = tf.sqrt(tf.add_n([one, other]) + 1.0)
        with tf.device(SECOND):
            read = tf.identity(root)
        ops = graph.get_operations()
        repeat_where_read(graph, ops, ops, lambda op: process_of(op.device), range(2), "repeated")
        assert read.op.inputs[0].op.type == "Sqrt" and read.op.inputs[0].device == SECOND
        assert read.op.inputs[0].op.inputs[0].op.inputs[0].op.inputs[0].op is one.op
        for op in graph.get_operations():
            op._set_device("/device:CPU:0")
        with tf.Session(graph=graph) as session:
            np.testing.assert_array_equal(*session.run([root, read]))
