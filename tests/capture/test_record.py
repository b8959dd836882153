"""The recording says about every op what TensorFlow says."""
from __future__ import annotations

from typing import Any, Callable, List

import numpy as np
import pytest
import tensorflow as tf

from tests.capture.models import MODELS, dense, placeholder
from whale_tf.capture.record import record
from whale_tf.errors import GraphError
from whale_tf.ir.graph import OpGraph, Phase

v1 = tf.compat.v1


def _shape(tensor: Any) -> Any:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def assert_same_ops(ops: OpGraph, graph: Any, operations: List[Any]) -> None:
    for operation in operations:
        op = ops.op(operation.name)
        assert op.type == operation.type
        assert op.device == operation.device
        assert [ops.tensor_name(tensor) for tensor in op.inputs] == [tensor.name for tensor in operation.inputs]
        assert ({ops.ops[control].name for control in op.control_inputs}
                == {control.name for control in operation.control_inputs})
        assert [ops.tensors[tensor].dtype for tensor in op.outputs] == [t.dtype.name for t in operation.outputs]
        assert [ops.tensors[tensor].shape for tensor in op.outputs] == [_shape(t) for t in operation.outputs]
        if op.type == "Const":
            np.testing.assert_array_equal(op.value, tf.make_ndarray(operation.get_attr("value")))


def assert_topological(ops: OpGraph) -> None:
    for op in ops.ops:
        for source in ops.predecessors(op):
            assert source < op.id or ops.ops[source].type == "NextIteration", (op, ops.ops[source])
        for body in (op.body or {}).values():
            assert_topological(body)


@pytest.mark.slow
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_op_is_recorded_as_tensorflow_has_it(graph: Any, hooked: None, control_flow: Callable[[bool], None],
                                                   name: str, resource: bool, functional: bool) -> None:
    control_flow(functional)
    v1.get_variable_scope().set_use_resource(resource)
    MODELS[name]()
    ops = record(graph)
    assert len(ops.ops) == len(graph.get_operations())
    assert_same_ops(ops, graph, graph.get_operations())
    assert_topological(ops)


def test_ops_keep_creation_order_where_it_is_topological(graph: Any, hooked: None) -> None:
    MODELS["mlp"]()
    assert [op.name for op in record(graph).ops] == [operation.name for operation in graph.get_operations()]


@pytest.mark.parametrize("functional", [False, True])
def test_differentiated_loop_is_put_in_topological_order(graph: Any, hooked: None, functional: bool,
                                                           control_flow: Callable[[bool], None]) -> None:
    control_flow(functional)
    MODELS["loop"]()
    ops = record(graph)
    assert_topological(ops)
    kind = "While" if functional else "StackPushV2"
    assert any(op.type == kind for op in ops.ops)
    assert [op.name for op in ops.ops] != [operation.name for operation in graph.get_operations()]


def test_attributes_are_plain_python_values(graph: Any) -> None:
    x = placeholder([None, 4, 4, 2])
    tf.nn.conv2d(x, tf.zeros([3, 3, 2, 5]), strides=[1, 2, 2, 1], padding="SAME", name="conv")
    tf.cast(x, tf.int32, name="cast")
    tf.reshape(x, tf.constant([-1, 32], name="to"), name="reshape")
    v1.get_variable("v", [2, 3], dtype=tf.float64)
    ops = record(graph)
    conv = ops.op("conv").attrs
    assert conv["strides"] == (1, 2, 2, 1)
    assert conv["padding"] == "SAME"
    assert conv["use_cudnn_on_gpu"] is True
    assert conv["T"] == "float32"
    assert ops.op("cast").attrs["DstT"] == "int32"
    assert ops.op("x").attrs["shape"] == (None, 4, 4, 2)
    assert ops.op("v").attrs["shape"] == (2, 3)
    assert ops.op("v").attrs["dtype"] == "float64"
    assert ops.op("to").value.tolist() == [-1, 32]
    assert "value" not in ops.op("to").attrs


def test_large_constants_have_no_value(graph: Any) -> None:
    tf.constant(np.zeros(4096, np.float32), name="small")
    tf.constant(np.zeros(4097, np.float32), name="large")
    tf.constant(np.arange(4097), name="large_with_content")
    ops = record(graph)
    assert ops.op("small").value.shape == (4096,)
    assert ops.op("large").value is None
    assert ops.op("large_with_content").value is None


def test_constant_values_cannot_be_changed(graph: Any) -> None:
    tf.constant([1.0, 2.0], name="c")
    with pytest.raises(ValueError, match="read-only"):
        record(graph).op("c").value[0] = 5.0


@pytest.mark.parametrize("value", [True, 3, 2.5, b"text", [1, 2], [[1.0], [2.0]], [], ["a", "b"]])
def test_constants_of_every_kind(graph: Any, value: Any) -> None:
    tensor = tf.constant(value, name="c")
    recorded = record(graph).op("c").value
    assert recorded.shape == tuple(tensor.shape.as_list())
    np.testing.assert_array_equal(recorded, tf.make_ndarray(tensor.op.get_attr("value")))


def test_equal_shapes_are_one_object(graph: Any) -> None:
    a, b = placeholder([None, 8], "a"), placeholder([None, 8], "b")
    tf.add(a, b)
    ops = record(graph)
    assert len({id(tensor.shape) for tensor in ops.tensors}) == 1


def test_reference_edges_are_named_so(graph: Any) -> None:
    v1.get_variable("v", [2], use_resource=False)
    v1.get_variable("r", [2], use_resource=True)
    ops = record(graph)
    assert ops.tensors[ops.tensor("v")].dtype == "float32_ref"
    assert ops.tensors[ops.tensor("v/read")].dtype == "float32"
    assert ops.tensors[ops.tensor("r")].dtype == "resource"


def test_tags_become_fields(graph: Any, hooked: None) -> None:
    MODELS["momentum"]()
    ops = record(graph)
    backward = [op for op in ops.ops if op.phase is Phase.BACKWARD]
    assert {op.name.split("/")[0] for op in backward} == {"gradients"}
    matmul = ops.op("gradients/a/MatMul_grad/MatMul_1")
    assert ops.ops[matmul.forward].name == "a/MatMul"
    assert ops.op("a/MatMul").forward == -1
    assert ops.op("a/MatMul").phase is Phase.FORWARD
    assert not any("_whale_forward" in op.attrs or "_whale_task_graph" in op.attrs for op in ops.ops)


@pytest.mark.parametrize("name, type_, keys", [
    ("loop", "While", {"cond", "body"}), ("condition", "If", {"then_branch", "else_branch"})])
def test_function_bodies_are_op_graphs(graph: Any, hooked: None, control_flow: Callable[[bool], None], name: str,
                                       type_: str, keys: Any) -> None:
    control_flow(True)
    MODELS[name]()
    ops = record(graph)
    op = next(op for op in ops.ops if op.type == type_)
    assert set(op.body) == keys
    for body in op.body.values():
        arguments = [inner for inner in body.ops if inner.type == "_Arg"]
        assert body.ops[:len(arguments)] == arguments
        results = [inner for inner in body.ops if inner.type == "_Retval"]
        assert [inner.attrs["index"] for inner in arguments] == list(range(len(arguments)))
        assert len(arguments) == len(op.inputs) - (type_ == "If")
        assert len(results) == (1 if body is op.body.get("cond") else len(op.outputs))
        assert all(ops.tensors[source].dtype == body.tensors[inner.outputs[0]].dtype
                   for source, inner in zip(op.inputs[type_ == "If":], arguments))
    key = "body" if name == "loop" else "then_branch"
    body = op.body[key]
    matmul = next(inner for inner in body.ops if inner.type == "MatMul")
    traced = graph._functions[op.attrs[key]].graph.get_operation_by_name(matmul.name)
    assert [body.tensors[t].shape for t in matmul.outputs] == [_shape(t) for t in traced.outputs]
    assert body.producer(matmul.inputs[1]).type == "ReadVariableOp"


def test_nested_bodies_and_multiple_outputs(graph: Any, control_flow: Callable[[bool], None]) -> None:
    control_flow(True)
    x = placeholder([4, 6])

    def body(i: Any, h: Any) -> Any:
        left, right = tf.split(h, 2, axis=1)
        return i + 1, tf.concat([v1.cond(i > 1, lambda: right, lambda: left + 1.0), left], axis=1)

    v1.while_loop(lambda i, h: i < 3, body, [0, x])
    outer = next(op for op in record(graph).ops if op.type in ("While", "StatelessWhile")).body["body"]
    split = next(op for op in outer.ops if op.type == "Split")
    assert [outer.tensors[t].shape for t in split.outputs] == [(4, 3), (4, 3)]
    inner = next(op for op in outer.ops if op.type in ("If", "StatelessIf"))
    assert split.outputs[1] in inner.inputs
    assert set(inner.body) == {"then_branch", "else_branch"}
    assert any(op.type in ("Add", "AddV2") for op in inner.body["else_branch"].ops)


def test_bodies_of_an_imported_graph_have_dtypes(graph: Any, control_flow: Callable[[bool], None]) -> None:
    control_flow(True)
    with graph.as_default():
        MODELS["loop"]()
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(graph.as_graph_def(add_shapes=True), name="copy")
        ops = record(copy)
    body = next(op for op in ops.ops if op.type == "While").body["body"]
    matmul = next(op for op in body.ops if op.type == "MatMul")
    assert body.tensors[matmul.outputs[0]].dtype == "float32"


def test_bodies_of_an_imported_graph_may_lack_default_attributes(graph: Any, control_flow: Callable[[bool], None]) -> None:
    """As ``export_meta_graph(strip_default_attrs=True)`` writes them."""
    control_flow(True)
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 4])
        tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h * tf.cast(tf.shape(h)[0], tf.float32)), [0, x])
    written = graph.as_graph_def()
    stripped = [node.attr.pop("out_type") for function in written.library.function for node in function.node_def
                if node.op == "Shape"]
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(written, name="copy")
        ops = record(copy)
    body = next(op for op in ops.ops if op.type in ("While", "StatelessWhile")).body["body"]
    shape = next(op for op in body.ops if op.type == "Shape")
    assert stripped and body.tensors[shape.outputs[0]].dtype == "int32"


def test_cycle_that_is_no_loop_is_refused(graph: Any) -> None:
    a = tf.identity(1.0, name="a")
    b = tf.identity(a, name="b")
    a.op._add_control_input(b.op)
    with pytest.raises(GraphError, match="'a' .*waits for itself"):
        record(graph)


def test_recording_leaves_the_graph_alone(graph: Any, hooked: None) -> None:
    dense(placeholder(), 2, "a")
    before = graph.as_graph_def()
    graph.finalize()
    record(graph)
    assert graph.as_graph_def() == before
