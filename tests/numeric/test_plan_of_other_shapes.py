"""A plan is for variables of the shapes it was made for; what a TaskGraph keeps is counted by its variables."""
from __future__ import annotations

from typing import Any, Optional

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.capture.captured import capture
from whale_tf.decide.facts import analysed, facts
from whale_tf.ir.batch_axis import Options
from whale_tf.planner.assemble import StageStatistics


def parallelized(width: int, plan: Optional[Any] = None) -> Optional[wh.Plan]:
    wh.init({}, cluster="cpu:2", plan=plan)
    try:
        with tf.Graph().as_default():
            x = tf.placeholder("float32", [8, 6], name="x")
            w = tf.get_variable("w", [6, width])
            tf.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(tf.square(tf.matmul(x, w))))
            wh.parallelize()
        return wh.current_plan()
    finally:
        wh.shutdown()


def test_shapes_of_variables_are_part_of_the_fingerprint() -> None:
    plan = parallelized(6)
    assert plan is not None and parallelized(6, plan.to_json()) == plan
    with pytest.raises(wh.PlanError, match="shapes of variables changed; make a new plan"):
        parallelized(4, plan.to_json())
    old = plan.to_json().replace(plan.graph, plan.graph.split("-")[0])
    assert parallelized(6, old) is not None


def statistics(sparse: bool) -> StageStatistics:
    """Of a table of 1,000 rows, of which a mini-batch reads 8."""
    wh.init({}, cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            table = tf.get_variable("table", [1000, 4])
            rows = tf.nn.embedding_lookup(table, tf.placeholder("int32", [8], name="ids")) if sparse else table
            tf.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(tf.square(rows)))
        captured = capture(graph)
        (found,) = facts(captured, analysed(captured, Options())).stages
        return found
    finally:
        wh.shutdown()


def test_table_with_a_sparse_gradient_is_counted_whole() -> None:
    size = 4 * 1000 * 4
    dense, sparse = statistics(False), statistics(True)
    assert dense.parameter_bytes == sparse.parameter_bytes == size and dense.state_bytes == sparse.state_bytes == size
    assert dense.gradient_bytes == size > sparse.gradient_bytes
    assert dense.resident_bytes == 3 * size and 2 * size <= sparse.resident_bytes < 3 * size
