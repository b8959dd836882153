"""Copies of library functions with other nodes, operands, parameters and results."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.graph_editor.graphs import control_flow, run
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor import StagedEdit, call_functions, find_ops, forget_output_shapes, function_names
from whale_tf.graph_editor.function_copy import FunctionCopy, append_inputs


def loop_graph() -> Any:
    """y = x * 2 ** 3 by a functional loop."""
    graph = tf.Graph()
    with graph.as_default(), control_flow(2):
        x = v1.placeholder(tf.float32, [4], name="x")
        v1.placeholder(tf.float32, [2], name="short")
        v1.placeholder(tf.float32, [], name="factor")
        tf.identity(tf.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, v1.multiply(t, 2.0, name="twice")), [0, x])[1],
                    name="y")
    loop, = find_ops(graph, matching=lambda op: op.type in ("While", "StatelessWhile"))
    return graph, loop


def twice_in(copy: FunctionCopy) -> str:
    """Name of the multiplication, which TensorFlow may put in a scope."""
    name, = (node.name for node in copy.definition.node_def if node.op == "Mul")
    return str(name)


def clone_calling(graph: Any, loop: Any, functions: Any, inputs: Any = ()) -> None:
    """Clones the loop under ``copy/``, with other functions, reading ``short`` and whatever is given."""
    edit = StagedEdit(graph)
    for function in functions.values():
        edit.add_function(function)

    def change(node: Any, op: Any) -> None:
        if op is loop:
            forget_output_shapes(node)
            call_functions(node, {old: new.signature.name for old, new in functions.items()})
            append_inputs(node, inputs)
            node.attr["T"].list.type.extend(tf.float32.as_datatype_enum for _ in inputs)

    ops = [op for op in graph.get_operations() if op.type != "Placeholder"]
    edit.clone(ops, "copy", input_map={"x": "short"}, edit=change)
    edit.commit()


def test_operand_replaced_by_a_new_node_changes_the_copy_only():
    graph, loop = loop_graph()
    body = function_names(loop.node_def)["body"]
    copy = FunctionCopy(graph, body)
    three = copy.const(np.float32(3.0), "three")
    copy.set_operand(twice_in(copy), 1, three)
    assert copy.is_changed and copy.operand(twice_in(copy), 1) == three
    clone_calling(graph, loop, {body: copy.finish(body + "_tripled")})
    feed = {"x:0": np.ones(4), "short:0": np.ones(2)}
    y, y_copy = run(graph, ["y:0", "copy/y:0"], feed)
    np.testing.assert_allclose(y, np.full(4, 8.0))
    np.testing.assert_allclose(y_copy, np.full(2, 27.0))


def test_further_parameter_is_passed_through_a_loop():
    graph, loop = loop_graph()
    names = function_names(loop.node_def)
    functions = {}
    for attribute in ("body", "cond"):
        copy = FunctionCopy(graph, names[attribute])
        if attribute == "body":
            copy.set_operand(twice_in(copy), 1, "later")
        parameter = copy.parameter("factor", tf.float32)
        copy.replace({"later": parameter})
        if attribute == "body":
            copy.return_also(parameter, tf.float32)
        functions[names[attribute]] = copy.finish(names[attribute] + "_by_factor")
    clone_calling(graph, loop, functions, ["factor"])
    feed = {"x:0": np.ones(4), "short:0": np.ones(2), "factor:0": 5.0}
    np.testing.assert_allclose(run(graph, "copy/y:0", feed), np.full(2, 125.0))


def test_result_can_be_another_tensor():
    graph, loop = loop_graph()
    body = function_names(loop.node_def)["body"]
    copy = FunctionCopy(graph, body)
    index = next(i for i in range(len(loop.outputs)) if copy.result(i).startswith(twice_in(copy)))
    negated = copy.add("Neg", "negated", [copy.result(index)], attrs={"T": tf.float32})
    copy.set_result(index, negated)
    clone_calling(graph, loop, {body: copy.finish(body + "_negated")})
    np.testing.assert_allclose(run(graph, "copy/y:0", {"short:0": np.ones(2)}), np.full(2, -8.0))


def test_new_nodes_never_take_a_name_of_the_function():
    graph, loop = loop_graph()
    copy = FunctionCopy(graph, function_names(loop.node_def)["body"])
    twice = twice_in(copy)
    assert copy.const(1.0, twice) == twice + "_1:output:0"
    assert copy.node(twice + "_1").op == "Const" and copy.node(twice).op == "Mul"


def test_functions_that_are_missing_or_taken_are_refused():
    graph, loop = loop_graph()
    body = function_names(loop.node_def)["body"]
    with pytest.raises(GraphEditError, match="no function 'nobody'"):
        FunctionCopy(graph, "nobody")
    edit = StagedEdit(graph)
    function = FunctionCopy(graph, body).finish(body + "_copy")
    edit.add_function(function)
    with pytest.raises(GraphEditError, match="already has a function"):
        edit.add_function(function)


def test_further_inputs_come_before_the_ops_a_node_waits_for():
    node = v1.NodeDef(name="n", op="While", input=["a", "b:1", "^c"])
    append_inputs(node, ["d"])
    assert list(node.input) == ["a", "b:1", "d", "^c"]


def test_function_made_of_a_graphs_own_nodes(graph: tf.Graph) -> None:
    """Two ops as a function: outputs by name and place, devices and colocations dropped, waits kept."""
    x = v1.placeholder(tf.float32, [4], name="x")
    with tf.device("/device:CPU:0"):
        parts = tf.split(x, 2, name="parts")
    with v1.control_dependencies([parts[0].op]):
        total = tf.add(parts[0], parts[1], name="total")
    copy = FunctionCopy(graph)
    argument, axis = copy.parameter("argument", tf.float32), copy.const(0, "axis")
    for op, inputs, waits in ((parts[0].op, [axis, argument], []), (total.op, ["", ""], ["parts"])):
        assert copy.insert(op.node_def, inputs, waits).device == ""
    for position in (0, 1):
        copy.set_operand("total", position, copy.edge(parts[0].op.node_def, position))
    assert list(copy.node("total").input) == ["parts:output:0", "parts:output:1", "^parts"]
    copy.return_also(copy.edge(total.op.node_def, 0), tf.float32, "result")
    edit = StagedEdit(graph)
    edit.add_function(copy.finish("halves_added"))
    edit.add("PartitionedCall", "call", ["x"], attrs={"Tin": [tf.float32], "Tout": [tf.float32], "f": "halves_added"})
    call = edit.commit()["call"]
    assert not copy.definition.signature.is_stateful
    with v1.Session(graph=graph) as session:
        assert session.run(call.outputs[0], {x: [1, 2, 3, 4]}).tolist() == [4, 6]


def test_function_with_a_stateful_op_is_stateful(graph: tf.Graph) -> None:
    v1.random_uniform([2], name="drawn")
    copy = FunctionCopy(graph)
    copy.insert(graph.get_operation_by_name("drawn/RandomUniform").node_def)
    assert copy.definition.signature.is_stateful


def test_output_that_an_op_does_not_have(graph: tf.Graph) -> None:
    constant = v1.constant(1.0, name="one")
    with pytest.raises(GraphEditError, match="node 'one' .Const. has 1 outputs, so there is no output 1"):
        FunctionCopy(graph).edge(constant.op.node_def, 1)
