"""Every rule against the op it describes, on the TensorFlow that is installed."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tests.ir import sharding
from tests.ir.cases import NOT_BUILT, all_cases, told
from whale_tf.ir.traits import GENERATORS, RANDOM, TABLE, types_where

with tf.Graph().as_default():
    CASES = all_cases()

# Results that depend on more than the operands (random, positions, sizes), op types whose kernels are rare, and versions of
# an op that differ in nothing the rule reads.
UNTESTED = {"Range", "Rank", "Shape", "ShapeN", "Size", "Multinomial", "RandomShuffle", "ResourceGather", "ResourceGatherNd", "SparseMatMul",
            "LookupTableFind", "LookupTableFindV2",
            "ParallelDynamicStitch", "BatchMatMulV3", "BlockLSTMV2", "BlockLSTMGradV2", "CumulativeLogsumexp", "TopK"} | (GENERATORS & RANDOM) | NOT_BUILT


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_make_up_the_whole(case: sharding.Case) -> None:
    sharding.check_factors(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_roles_are_what_the_op_does(case: sharding.Case) -> None:
    sharding.check_roles(case)


def test_every_computing_op_type_has_a_case() -> None:
    computing = types_where(lambda row: row.rule != "" and not row.rule.startswith(("state.", "control_flow.")))
    with tf.Graph().as_default():
        tested = {sharding.op_of(case, [tf.constant(array) for array in case.arrays]).type for case in CASES}
    available = {name for name in computing if hasattr(tf.raw_ops, name)}
    assert not available - tested - UNTESTED, "add a case for each of these"


def test_enough_factors_are_checked() -> None:
    """The first test would pass if every factor were called undividable."""
    checked = [sharding.check_factors(case) for case in CASES[::7]]
    assert sum(map(len, checked)) >= 1.5 * len(checked)


@pytest.mark.parametrize("type_, arguments", told())
def test_results_have_the_rows_that_are_told(type_: str, arguments: Dict[str, Any]) -> None:
    count = {"rows": lambda x: x.shape[0], "splits": lambda x: x.size - 1, "shape": lambda x: x.flat[0], "elements": lambda x: x.size}
    (kind, result), (source, operands, *only_matrix) = (side.split() for side in TABLE[type_].measure.split("="))
    with tf.Graph().as_default() as graph, tf.Session() as session:
        getattr(tf.raw_ops, type_)(**arguments)
        op = graph.get_operations()[-1]
        found, inputs = session.run([op.outputs[int(result)], [op.inputs[int(place)] for place in operands.split("|")]])
    teller = next(np.asarray(x) for x in inputs if np.ndim(x) or source == "shape")
    dims = teller.size if source == "shape" else teller.ndim
    if dims > len(only_matrix):
        assert count[kind](found) == count[source](teller)
    else:
        assert found.ndim == 1 and (kind == "rows" or len(found) == 1)  # the result is a row


def test_every_measure_of_a_told_row_has_a_case() -> None:
    missing = types_where(lambda row: "=" in row.measure) - {type_ for type_, _ in told()}
    assert not [type_ for type_ in missing if hasattr(tf.raw_ops, type_)]


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_sharded_table_are_looked_up_and_added(axis: int) -> None:
    """The meaning of LOOKUP: a shard answers zero for rows it does not hold."""
    table = np.random.RandomState(0).uniform(size=(7, 5) if axis == 0 else (5, 7))
    ids = np.array([[0, 6], [3, 2]], np.int32)
    with tf.Graph().as_default(), tf.Session() as session:
        whole = tf.gather(table, ids, axis=axis)
        parts = []
        for low, high in ((0, 2), (2, 7)):
            held = np.take(table, range(low, high), axis=axis)
            mine = tf.logical_and(ids >= low, ids < high)
            found = tf.gather(held, tf.clip_by_value(ids - low, 0, high - low - 1), axis=axis)
            mask = tf.cast(tf.expand_dims(mine, -1) if axis == 0 else tf.expand_dims(mine, 0), tf.float64)
            parts.append(found * mask)
        expected, actual = session.run([whole, tf.add_n(parts)])
    np.testing.assert_allclose(actual, expected)
