"""Loops and conditionals: frames, clones of version 1 and functional control flow, copies of function bodies."""
from __future__ import annotations

import numpy as np
import pytest

from tests.graph_editor.graphs import control_flow, gradient_of, run, variable
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor import (
    FunctionCopy,
    StagedEdit,
    call_functions,
    find_ops,
    forget_output_shapes,
    frames,
    function_def,
    function_names,
)


def build(version, resource, body):
    """x, x2 (placeholders), w (variable), y = body(x, w), gw = dy/dw; returns the graph."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(version):
        x = v1.placeholder(tf.float32, [2], name="x")
        v1.placeholder(tf.float32, [2], name="x2")
        w = variable("w", [2.0, 3.0], resource)
        y = tf.identity(body(x, w), name="y")
        gradient_of(y, w, "gw")
    return graph


def power(x, w):
    """x * w ** 3 by a loop."""
    return tf.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * w), [0, x])[1]


def nested(x, w):
    """x * w ** 4 by a loop in a loop."""
    def twice(i, t):
        return i + 1, tf.while_loop(lambda j, s: j < 2, lambda j, s: (j + 1, s * w), [0, t], name="inner")[1]

    return tf.while_loop(lambda i, t: i < 2, twice, [0, x], name="outer")[1]


def branch(x, w):
    return tf.cond(tf.reduce_sum(x) > 5.0, lambda: x * w, lambda: x - w)


def model_ops(graph):
    """Everything but placeholders and the variable."""
    return [op for op in graph.get_operations() if op.name.split("/")[0] not in ("x", "x2", "w")]


# ------------------------------------------------------------------------------------------------------------- clones
@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("body", [power, nested, branch])
def test_forward_and_backward_clones_compute_what_the_originals_do(version, resource, body):
    graph = build(version, resource, body)
    edit = StagedEdit(graph)
    first = edit.clone(model_ops(graph), "first", input_map={"x": "x2"}, device="/cpu:1")
    second = edit.clone(model_ops(graph), "second", input_map={"x": first["y"]})
    edit.commit()
    types = {op.type for op in graph.get_operations()}
    assert bool(types & {"Enter", "RefEnter", "Switch", "RefSwitch"}) == (version == 1)
    feed = {"x:0": [1.0, -2.0], "x2:0": [4.0, 2.0]}
    y, gw = run(graph, ["y:0", "gw:0"], {"x:0": feed["x2:0"], "x2:0": [0.0, 0.0]})
    y_first, gw_first = run(graph, [first["y"] + ":0", first["gw"] + ":0"], feed)
    np.testing.assert_allclose(y_first, y, rtol=1e-6)
    np.testing.assert_allclose(gw_first, gw, rtol=1e-6)
    y_of_y, gw_of_y = run(graph, ["y:0", "gw:0"], {"x:0": y, "x2:0": [0.0, 0.0]})
    y_second, gw_second, y_old = run(graph, [second["y"] + ":0", second["gw"] + ":0", "y:0"], feed)
    np.testing.assert_allclose(y_second, y_of_y, rtol=1e-6)
    np.testing.assert_allclose(gw_second, gw_of_y, rtol=1e-6)
    np.testing.assert_allclose(y_old, run(graph, "y:0", feed))


def test_every_clone_of_a_loop_has_frames_of_its_own():
    graph = build(1, True, power)
    before = frames(graph)
    edit = StagedEdit(graph)
    edit.clone(model_ops(graph), "a")
    edit.clone(model_ops(graph), "b")
    edit.commit()
    after = frames(graph)
    assert len(before) == 2 and len(after) == 6  # the loop and its gradient's, three times
    for name, frame in before.items():
        assert after[name].ops == frame.ops
    sizes = sorted(len(frame.ops) for frame in after.values())
    assert sizes == sorted(3 * [len(frame.ops) for frame in before.values()])


def test_loop_cut_in_two_is_refused():
    graph = build(1, True, power)
    whole = model_ops(graph)
    part = [op for op in whole if op.type != "Merge"]
    edit = StagedEdit(graph)
    with pytest.raises(GraphEditError, match="cuts through the while loop 'while/while_context'.*'while/Merge"):
        edit.clone(part, "part")
    assert len(edit) == 0


def test_ops_can_be_added_inside_a_loop():
    """An op that reads a tensor inside a v1 loop runs in the loop's frame, although Python gives it no context."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(1):
        x = v1.placeholder(tf.float32, [2], name="x")
        inside = []

        def body(i, t):
            inside.append(tf.identity(t * 2.0, name="doubled"))
            return i + 1, tf.identity(inside[0], name="out")

        tf.identity(tf.while_loop(lambda i, t: i < 2, body, [0, x])[1], name="y")
        out = inside[0].consumers()[0]
        context = inside[0].op._get_control_flow_context()
        edit = StagedEdit(graph)
        edit.add("Neg", "flipped", [inside[0].name])
        flipped = edit.commit()["flipped"]
        out._update_input(0, flipped.outputs[0])
    assert inside[0].op._get_control_flow_context() is context and context is not None
    np.testing.assert_allclose(run(graph, "y:0", {"x:0": [1.0, 3.0]}), [4.0, 12.0])
    assert flipped in frames(graph)["while/while_context"].ops


def test_loop_can_be_staged_node_by_node():
    """A cycle, NextIteration to Merge, in one commit: doubles x until it reaches 100."""
    graph = tf.Graph()
    edit = StagedEdit(graph)
    edit.const(np.float32(3), "x")
    edit.add("Enter", "enter", ["x"], attrs={"frame_name": "loop"})
    edit.add("Merge", "merge", ["enter", "next"], attrs={"N": 2})
    edit.const(np.float32(100), "limit", control_inputs=["merge"])
    edit.add("Less", "less", ["merge", "limit"])
    edit.add("LoopCond", "cond", ["less"])
    edit.add("Switch", "switch", ["merge", "cond"])
    edit.add("Identity", "stay", ["switch:1"])
    edit.add("Add", "double", ["stay", "stay"])
    edit.add("NextIteration", "next", ["double"])
    edit.add("Exit", "exit", ["switch"])
    edit.commit()
    assert run(graph, "exit:0") == 192.0


# ------------------------------------------------------------------------------------------------------------- frames
def test_frames_know_their_ops_and_their_parent():
    graph = tf.Graph()
    with graph.as_default(), control_flow(1):
        x = tf.constant([1.0, 2.0], name="x")
        w = tf.constant([2.0, 3.0], name="w")
        tf.identity(nested(x, w), name="y")
    found = frames(graph)
    assert {name: frame.parent for name, frame in found.items()} == {
        "outer/while_context": None, "outer/inner/while_context": "outer/while_context"}
    members = [op for frame in found.values() for op in frame.ops]
    assert len(members) == len(set(members))
    outside = {op.name for op in graph.get_operations()} - {op.name for op in members}
    assert outside == {"x", "w", "y", "outer/Const"}  # the last is the counter's first value
    assert all(op.name.startswith("outer/inner/") for op in found["outer/inner/while_context"].ops)


# ---------------------------------------------------------------------------------------------------------- functions
def scaled_loop_graph():
    """A functional loop whose body holds a constant of the batch size: t = reshape(t * 2, [4, 2])."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(2):
        x = v1.placeholder(tf.float32, [4, 2], name="x")
        v1.placeholder(tf.float32, [2, 2], name="half")
        tf.identity(tf.while_loop(
            lambda i, t: i < 3, lambda i, t: (i + 1, tf.reshape(t * 2.0, tf.constant([4, 2], name="extent"))),
            [0, x])[1], name="y")
    return graph


def is_loop(op):
    return op.type in ("While", "StatelessWhile")


def test_clone_runs_a_changed_body():
    graph = scaled_loop_graph()
    loop, = find_ops(graph, matching=is_loop)
    body = function_names(loop.node_def)["body"]

    copy = FunctionCopy(graph, body)
    for node in copy.definition.node_def:
        if node.op == "Const" and node.attr["value"].tensor.tensor_shape.dim:
            node.attr["value"].tensor.CopyFrom(v1.make_tensor_proto([2, 2]))

    def edit_loop(node, op):
        if is_loop(op):
            call_functions(node, {body: body + "_half"})
            forget_output_shapes(node)

    edit = StagedEdit(graph)
    assert edit.add_function(copy.finish(body + "_half")) == body + "_half"
    ops = [op for op in graph.get_operations() if op.type != "Placeholder"]
    names = edit.clone(ops, "copy", input_map={"x": "half"}, edit=edit_loop)
    edit.commit()
    assert graph.get_tensor_by_name(names[loop.name] + ":0").op.get_attr("body").name == body + "_half"
    np.testing.assert_allclose(run(graph, "copy/y:0", {"half:0": np.ones([2, 2])}), np.full([2, 2], 8.0))
    np.testing.assert_allclose(run(graph, "y:0", {"x:0": np.ones([4, 2])}), np.full([4, 2], 8.0))


def test_functions_that_are_missing_or_taken_are_refused():
    graph = scaled_loop_graph()
    loop, = find_ops(graph, matching=is_loop)
    body = function_names(loop.node_def)["body"]
    with pytest.raises(GraphEditError, match="no function 'nobody'"):
        function_def(graph, "nobody")
    with pytest.raises(GraphEditError, match="already has a function"):
        StagedEdit(graph).add_function(FunctionCopy(graph, body).finish(body))


def test_function_names_and_calls_of_lists_of_branches():
    node = v1.NodeDef(name="case", op="Case")
    for name in ("f", "g"):
        node.attr["branches"].list.func.add().name = name
    assert function_names(node) == {"branches[0]": "f", "branches[1]": "g"}
    call_functions(node, {"g": "h"})
    assert function_names(node) == {"branches[0]": "f", "branches[1]": "h"}
