"""What ops outside of the clones read if they need the rows of all processes, looked at in one process."""

from __future__ import annotations

from typing import Callable, List, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.cluster import Cluster, Processes
from whale_tf.communicators import Keys
from whale_tf.config import Config
from whale_tf.parallelize import parallelize

STEPS, BATCH, WIDTH = 3, 4, 2


def time_major() -> Tuple[tf.Tensor, int]:
    return wh.batch_axis(tf.placeholder(tf.float64, [STEPS, BATCH, WIDTH]), 1), 1


def two_views() -> Tuple[tf.Tensor, int]:
    """Both batches of a contrastive loss, one after the other."""
    return tf.concat([tf.placeholder(tf.float64, [BATCH, WIDTH], name) for name in "xy"], 0), 0


def one_of_two(inputs: Callable[[], Tuple[tf.Tensor, int]]) -> tf.GraphDef:
    """The graph of one of two processes, without devices: a variable follows from running totals over all examples."""
    wh.init({}, cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            wh.set_default_strategy(wh.replicate())
            x, dim = inputs()
            h = tf.tanh(x * tf.get_variable("v", [WIDTH], tf.float64))
            tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(h)))
            most = tf.get_variable("most", [], tf.float64, trainable=False)
            tf.assign(most, tf.reduce_max(tf.cumsum(h, axis=dim, name="totals")))
            assert parallelize(graph, Cluster.parse("2xcpu:1"), Config(), None, Processes(("a:1", "b:1"), 0), Keys()) is not None
            found = graph.as_graph_def()
    finally:
        wh.shutdown()
    for node in found.node:
        node.device = ""
    return found


def gathers(graph: tf.Graph) -> List[tf.Operation]:
    return [op for op in graph.get_operations() if op.type == "CollectiveGather" and "processes" in op.name]


def test_rows_of_all_processes_are_joined_along_their_own_dimension() -> None:
    with tf.Graph().as_default() as graph, tf.Session() as session:
        tf.import_graph_def(one_of_two(time_major), name="")
        gather, = gathers(graph)
        rows = np.random.RandomState(0).rand(2 * BATCH, STEPS, WIDTH)  # the dimension of the examples comes first
        found = session.run(graph.get_operation_by_name("totals").inputs[0], {gather.outputs[0]: rows})
    np.testing.assert_array_equal(found, rows.transpose([1, 0, 2]))


def test_rows_of_all_processes_are_joined_block_by_block() -> None:
    """The first view of all processes comes before the second."""
    with tf.Graph().as_default() as graph, tf.Session() as session:
        tf.import_graph_def(one_of_two(two_views), name="")
        rows = np.random.RandomState(0).rand(2, 2 * BATCH, WIDTH)
        feed = {gather.outputs[0]: part for gather, part in zip(gathers(graph), rows)}
        found = session.run(graph.get_operation_by_name("totals").inputs[0], feed)
    assert len(feed) == 2
    np.testing.assert_array_equal(found, np.concatenate(rows))
