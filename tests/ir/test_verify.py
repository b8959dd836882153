"""Every law of the op graph is broken once and reported by name."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

from tests.ir.graphs import Draft
from whale_tf.errors import GraphError
from whale_tf.ir.graph import Op, OpGraph, Tensor
from whale_tf.ir.verify import LAWS, verify


def legal() -> OpGraph:
    g = Draft()
    x = g.source(None, 4, name="x")
    y = g.op("Add", [x, g.const(np.ones(4, np.float32))], (None, 4), name="y")
    g.op("Identity", [y], (None, 4), name="z")
    return g.graph


def _swap_ids(graph: OpGraph) -> None:
    graph.ops[0].id = 3


def _loose_tensor(graph: OpGraph) -> None:
    graph.tensors.append(Tensor(0, 1, (), "float32"))


def _wrong_owner(graph: OpGraph) -> None:
    graph.tensors[2] = Tensor(0, 0, (None, 4), "float32")


def _same_name(graph: OpGraph) -> None:
    graph.ops[2].name = "x"


def _dangling(graph: OpGraph) -> None:
    graph.op("y").inputs = (0, 99)


def _dangling_control(graph: OpGraph) -> None:
    graph.op("y").control_inputs = (42,)


def _backwards(graph: OpGraph) -> None:
    graph.op("y").inputs = (0, 3)


def _bad_shape(graph: OpGraph) -> None:
    graph.tensors[0] = graph.tensors[0]._replace(shape=(-1, 4))


def _no_dtype(graph: OpGraph) -> None:
    graph.tensors[0] = graph.tensors[0]._replace(dtype="")


def _wrong_value(graph: OpGraph) -> None:
    graph.ops[1].value = np.ones(5, np.float32)


def _value_of_an_add(graph: OpGraph) -> None:
    graph.op("y").value = np.ones(5, np.float32)


def _two_operands(graph: OpGraph) -> None:
    graph.op("z").inputs = (2, 2)


def _bad_phase(graph: OpGraph) -> None:
    graph.op("z").phase = "forward"  # type: ignore[assignment]


def _bad_forward(graph: OpGraph) -> None:
    graph.op("z").forward = graph.op("z").id


@pytest.mark.parametrize("damage, message", [
    (_swap_ids, "numbered densely"), (_loose_tensor, "tensors belong to no op"), (_wrong_owner, "does not own its output"),
    (_same_name, "name of another op"), (_dangling, "reads tensor 99"), (_dangling_control, "waits for op 42"),
    (_backwards, "comes before 'z'"), (_bad_shape, r"shape \(-1, 4\)"), (_no_dtype, "without a dtype"),
    (_wrong_value, r"value of shape \(5,\)"), (_value_of_an_add, "is a Add with 2 inputs"), (_two_operands, "has 2 inputs"),
    (_bad_phase, "has phase 'forward'"), (_bad_forward, "is the backward op of op"),
])
def test_broken_law_is_named(damage: Callable[[OpGraph], Any], message: str) -> None:
    graph = legal()
    verify(graph)
    damage(graph)
    with pytest.raises(GraphError, match="test: illegal op graph.*" + message) as caught:
        verify(graph, "test")
    assert any(law.name in str(caught.value) for law in LAWS)


def test_loops_may_close_and_bodies_are_checked() -> None:
    g = Draft()
    start = g.op("Enter", [g.const(np.float32(0))], ())
    merge = g.graph.add("merge", "Merge", [start, start], [((), "float32"), ((), "int32")])
    back = g.op("NextIteration", [merge.outputs[0]], ())
    merge.inputs = (start, back)
    verify(g.graph)
    body = legal()
    _same_name(body)
    g.graph.add("call", "PartitionedCall", [], [], body={"f": body})
    with pytest.raises(GraphError, match="f of 'call'"):
        verify(g.graph)
    inner = g.graph.ops[-1]
    assert isinstance(inner, Op)
    inner.body = {"f": g.graph}  # a recursive function is checked once
    verify(g.graph)
