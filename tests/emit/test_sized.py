"""Integers that follow from the sizes of the step's inputs are computed by the process that reads them."""
from __future__ import annotations

from typing import Any, Callable, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from whale_tf.cluster import process_of
from whale_tf.emit.sized import read_own_sizes
from whale_tf.ir.walk import reached

FIRST, SECOND = ("/job:worker/replica:0/task:{}/device:CPU:0".format(task) for task in range(2))
BATCH = np.arange(1.0, 25.0).reshape(6, 4)


def own(build: Callable[[Any, Any], Any], rows: int = len(BATCH)) -> Tuple[bool, Any, Any]:
    """The second process reads what ``build`` makes in the first one, of a batch that both have and a value of the first process.

    Args:
        rows: of an input that both have and that is added to the batch.

    Returns:
        Whether it still reads something of the first process, what it reads, and what was written.
    """
    with tf.Graph().as_default() as graph:
        shift, batch = tf.placeholder(tf.float64, [None, 1], "shift"), tf.placeholder(tf.float64, [None, 4], "batch")
        with tf.device(FIRST):
            found = build(batch, tf.reshape(tf.matmul(batch + shift, tf.eye(4, dtype=tf.float64)), [-1, 2], name="value"))
        with tf.device(SECOND):
            tf.identity(found, "read")
        read = graph.get_operation_by_name("read")
        read_own_sizes(graph, [read], lambda op: process_of(op.device), "sizes")
        before = reached([read], lambda op: [tensor.op for tensor in op.inputs])
        definition = graph.as_graph_def()
    for node in definition.node:
        node.device = ""
    with tf.Graph().as_default(), tf.Session() as session:
        fetched = tf.import_graph_def(definition, return_elements=["read:0", found.name])
        numbers = session.run(fetched, {"import/batch:0": BATCH, "import/shift:0": np.zeros([rows, 1])})
    return (any(process_of(op.device) == 0 for op in before), *numbers)


@pytest.mark.parametrize("build", [
    lambda batch, value: tf.shape(value),
    lambda batch, value: tf.shape(value, out_type=tf.int64),
    lambda batch, value: tf.shape(value)[0],
    lambda batch, value: tf.size(value) // 3 * 0 + tf.shape(value)[0] * tf.shape(batch)[0] - 5,
    lambda batch, value: tf.stack([tf.shape(value), [7, 2]]),
    lambda batch, value: tf.shape(value)[2:],
    lambda batch, value: tf.constant([3, 4]) + 0 * tf.shape(value),
])
def test_numbers_of_inputs_do_not_cross(build: Callable[[Any, Any], Any]) -> None:
    crosses, read, written = own(build)
    assert not crosses
    assert read.dtype == written.dtype and read.shape == written.shape
    np.testing.assert_array_equal(read, written)


@pytest.mark.parametrize("build", [
    lambda batch, value: tf.cast(value, tf.int32),
    lambda batch, value: tf.shape(tf.where(value > 3.0))[0],  # rows chosen by data
    lambda batch, value: tf.shape(value)[0] // 4,  # not a multiple
    lambda batch, value: value,
])
def test_other_values_do(build: Callable[[Any, Any], Any]) -> None:
    crosses, read, written = own(build)
    assert crosses
    np.testing.assert_array_equal(read, written)


def test_inputs_with_other_rows_than_was_taken_for_granted_are_refused() -> None:
    """One row would be repeated, so that the sum has the rows of the batch; but the numbers are computed from the one row."""
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"batch:0.* has \{1\} rows, but .*shift:0.* has \{0\} in the"):
        own(lambda batch, value: tf.shape(value), 1)
