"""Sums as float16, with the other process played by a copy of this one's vector."""
from __future__ import annotations

from typing import Any, Callable, Dict

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from whale_tf.communicators.base import Member
from whale_tf.communicators.halves import sum_by_gather, sum_by_ring
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.graph_editor.staged import StagedEdit

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
ROUNDING = 2.0 ** -11  # of a float16


def ring(nodes: Nodes, member: Member) -> str:
    def total(one: Member, name: str) -> str:
        return nodes.add_n([one.value, one.value], name, tf.float16, HOST)

    return sum_by_ring(nodes, member, 2, "sum", lambda one, name: one.value, total)


def gather(nodes: Nodes, member: Member) -> str:
    def both(one: Member, name: str) -> str:
        return nodes.concat([one.value, one.value], 0, name, tf.int32, HOST)

    return sum_by_gather(nodes, member, 2, "sum", both)


def twice(stage: Callable[[Nodes, Member], str], values: np.ndarray) -> np.ndarray:
    with tf.Graph().as_default() as graph:
        tf.constant(values, tf.float32, name="values")
        edit = StagedEdit(graph)
        name = stage(Nodes(edit), Member("values", HOST))
        result = edit.commit()[name].outputs[0]
        with tf.Session() as session:
            return session.run(result)


CASES: Dict[str, Any] = {
    "ordinary": np.linspace(-2, 3, 101), "one": [0.1], "even": [0.1, -7.0], "zeros": np.zeros(5),
    "beyond float16": [7e4, -3e8, 1e9], "near the end of float32": [1.5e38, -1e38], "below float16": [3e-9, -1e-12, 2e-10],
    "tiny": [1e-28, 3e-29], "far apart": [1e6, 1.0, -1e-2]}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [ring, gather])
@pytest.mark.parametrize("name", CASES)
def test_twice_within_the_rounding_of_float16(stage: Any, name: str) -> None:
    values = np.asarray(CASES[name], np.float32)
    found = twice(stage, values)
    assert found.dtype == np.float32 and found.shape == values.shape
    smallest = 2.0 ** -24 * np.abs(values).max() / 8192  # elements far below the largest become subnormal
    np.testing.assert_allclose(found, 2 * values.astype("float64"), rtol=2 * ROUNDING, atol=smallest)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [ring, gather])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(stage: Any, value: float) -> None:
    assert not np.isfinite(twice(stage, np.array([1.0, value], np.float32))[1])
