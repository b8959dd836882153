"""Selections on one small graph: x -> a -> b -> y, a -> c, and c - - > y (control)."""
from __future__ import annotations

import pytest

from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor import (
    backward,
    between,
    boundary,
    consumers,
    find_ops,
    forward,
    predecessors,
    successors,
)


@pytest.fixture
def ops():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2], name="x")
        with tf.device("/job:worker/task:1/device:GPU:0"):
            a = tf.negative(x, name="a")
        with tf.device("/cpu:0"):
            b = tf.multiply(a, a, name="b")
            c = tf.exp(a, name="c")
        with tf.control_dependencies([c]):
            tf.identity(b, name="y")
    return {op.name: op for op in graph.get_operations()}


def names(found):
    return [op.name for op in found]


def test_find_ops(ops):
    graph = ops["x"].graph
    assert names(find_ops(graph)) == ["x", "a", "b", "c", "y"]
    assert names(find_ops(graph, name="[ab]$")) == ["a", "b"]
    assert names(find_ops(graph, op_type="Exp")) == ["c"]
    assert names(find_ops(graph, op_type=["Exp", "Mul"], name="b")) == ["b"]
    assert names(find_ops(graph, device="/device:GPU:0")) == ["a"]
    assert names(find_ops(graph, device="/job:worker")) == ["a"]
    assert names(find_ops(graph, device="/cpu:0")) == ["b", "c"]
    assert names(find_ops(graph, device="")) == ["x", "y"]
    assert names(find_ops(graph, matching=lambda op: len(op.inputs) == 2)) == ["b"]


@pytest.mark.parametrize("how, words", [({"name": "("}, "regular expression"), ({"device": "moon"}, "not a device")])
def test_find_ops_refuses(ops, how, words):
    with pytest.raises(GraphEditError, match=words):
        find_ops(ops["x"].graph, **how)


def test_neighbours(ops):
    assert consumers(ops["a"].outputs[0]) == [(ops["b"], 0), (ops["b"], 1), (ops["c"], 0)]
    assert names(successors(ops["a"])) == ["b", "c"]
    assert names(successors(ops["c"])) == ["y"] and names(successors(ops["c"], control=False)) == []
    assert names(predecessors(ops["y"])) == ["b", "c"] and names(predecessors(ops["y"], control=False)) == ["b"]


def test_forward(ops):
    assert names(forward([ops["a"]])) == ["a", "b", "c", "y"]
    assert names(forward([ops["a"].outputs[0]])) == ["b", "c", "y"]
    assert names(forward([ops["x"]], stop=[ops["b"]], control=False)) == ["x", "a", "b", "c"]
    assert names(forward([ops["x"]], within=[ops["x"], ops["a"], ops["y"]])) == ["x", "a"]


def test_backward(ops):
    assert names(backward([ops["y"]])) == ["y", "b", "c", "a", "x"]
    assert names(backward([ops["y"]], control=False)) == ["y", "b", "a", "x"]
    assert names(backward([ops["b"].outputs[0]], stop=[ops["a"]])) == ["b", "a"]


def test_between(ops):
    assert names(between([ops["a"]], [ops["y"]])) == ["a", "b", "c", "y"]
    assert names(between([ops["a"]], [ops["y"]], control=False)) == ["a", "b", "y"]
    assert names(between([ops["c"]], [ops["b"]])) == []


def test_boundary(ops):
    found = boundary([ops["b"], ops["a"], ops["c"], ops["b"]])
    assert [tensor.name for tensor in found.inputs] == ["x:0"]
    assert [tensor.name for tensor in found.outputs] == ["b:0"]
    assert (names(found.control_inputs), names(found.control_outputs)) == ([], ["c"])
    found = boundary([ops["y"]])
    assert ([t.name for t in found.inputs], names(found.control_inputs)) == (["b:0"], ["c"])


def test_selections_pass_through_loops():
    graph = tf.Graph()
    with graph.as_default():
        v1.placeholder(tf.float32, [], name="x")
        graph_def = graph.as_graph_def()
        for name, op, inputs in (("enter", "Enter", ["x"]), ("merge", "Merge", ["enter", "next"]),
                                 ("next", "NextIteration", ["merge"]), ("exit", "Exit", ["merge"])):
            node = graph_def.node.add(name=name, op=op, input=inputs)
            node.attr["T"].type = tf.float32.as_datatype_enum
            if op == "Enter":
                node.attr["frame_name"].s = b"f"
            if op == "Merge":
                node.attr["N"].i = 2
        tf.import_graph_def(graph_def, name="l")
    assert set(names(forward([graph.get_operation_by_name("l/x")]))) == {
        "l/x", "l/enter", "l/merge", "l/next", "l/exit"}
    assert set(names(backward([graph.get_operation_by_name("l/exit")]))) == {
        "l/x", "l/enter", "l/merge", "l/next", "l/exit"}
