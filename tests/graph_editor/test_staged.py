"""StagedEdit: what is added, what clones compute, what is refused."""
from __future__ import annotations

import numpy as np
import pytest

from tests.graph_editor.graphs import control_flow, gradient_of, run, variable
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.definitions import definitions_of
from whale_tf.graph_editor.staged import StagedEdit


def two_op_graph():
    """x -> mul(x, w) -> add(mul, w), with w = [2, 3]."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        w = tf.constant([2.0, 3.0], name="w")
        mul = tf.multiply(x, w, name="mul")
        tf.add(mul, w, name="add")
    return graph


def ops_named(graph, *names):
    return [graph.get_operation_by_name(name) for name in names]


# -------------------------------------------------------------------------------------------------------------- add
def test_new_nodes_may_refer_to_each_other_in_any_order_and_infer_their_types():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    total = edit.add("AddN", "total", ["mul", "add:0"])
    half = edit.add("Mul", "scaled", [total, "half"], attrs={"T": tf.float32})
    edit.const(np.float32(0.5), "half", device="/cpu:1")
    new = edit.commit()
    assert (total, half, sorted(new)) == ("total", "scaled", ["half", "scaled", "total"])
    assert new["total"].get_attr("N") == 2 and new["total"].get_attr("T") == tf.float32
    assert new["half"].device == "/device:CPU:1"
    np.testing.assert_allclose(run(graph, "scaled:0", {"x:0": [[1.0, 1.0]]}), [[3.0, 4.5]])


def test_taken_names_get_a_number_and_a_scope_counts_as_taken():
    graph = two_op_graph()
    with graph.as_default():
        tf.constant(1.0, name="scope/inner")
    edit = StagedEdit(graph)
    assert [edit.const(1.0, "w"), edit.const(1.0, "w"), edit.const(1.0, "scope")] == ["w_1", "w_2", "scope_1"]
    assert sorted(edit.commit()) == ["scope_1", "w_1", "w_2"]


def test_op_and_a_scope_of_its_name_can_be_staged_together():
    graph = tf.Graph()
    edit = StagedEdit(graph)
    edit.const(1.0, "a/b/c")
    edit.const(2.0, "a/b")
    edit.const(3.0, "a")
    assert sorted(edit.commit()) == ["a", "a/b", "a/b/c"]


def test_attributes_of_every_kind():
    graph = tf.Graph()
    edit = StagedEdit(graph)
    edit.add("Placeholder", "p", attrs={"dtype": np.float32, "shape": [None, 3], "_tag": b"t", "_flags": [True, False],
                                        "_n": 3, "_rates": [0.5], "_types": [tf.int32], "_shape": tf.TensorShape([2]),
                                        "_value": np.arange(3), "_empty": []})
    edit.add("MatMul", "m", ["p", "p"], attrs={"transpose_b": True})
    edit.add("Cast", "c", ["m"], attrs={"DstT": tf.int32})
    edit.add("IdentityN", "pair", ["m", "c"])
    edit.add("FIFOQueueV2", "q", attrs={"component_types": [tf.float32, "int32"], "shapes": [[2], []], "capacity": 5})
    new = edit.commit()
    p = new["p"]
    assert p.outputs[0].shape.as_list() == [None, 3]
    assert (p.get_attr("_tag"), p.get_attr("_flags"), p.get_attr("_n")) == (b"t", [True, False], 3)
    assert p.get_attr("_types") == [tf.int32] and p.get_attr("_rates") == [0.5]
    assert [t.dtype for t in new["pair"].outputs] == [tf.float32, tf.int32]
    assert new["q"].get_attr("capacity") == 5
    assert run(graph, "pair:1", {"p:0": [[1.0, 2.0, 2.0]]}).tolist() == [[9]]


def test_attr_value_and_tensor_protos_pass_through():
    graph = tf.Graph()
    edit = StagedEdit(graph)
    proto = v1.make_tensor_proto([1, 2])
    edit.add("Const", "c", attrs={"dtype": proto.dtype, "value": v1.AttrValue(tensor=proto)})
    edit.commit()
    assert run(graph, "c:0").tolist() == [1, 2]


def test_number_attributes_of_ops_with_two_lists():
    graph = tf.Graph()
    edit = StagedEdit(graph)
    edit.const([1, 2], "data")
    edit.const([0], "indices0")
    edit.const([1], "indices1")
    edit.const([10], "data0")
    edit.const([20], "data1")
    edit.add("DynamicStitch", "stitched", ["indices0", "indices1", "data0", "data1"])
    edit.commit()
    assert run(graph, "stitched:0").tolist() == [10, 20]


@pytest.mark.parametrize("op_type, how, words", [
    ("Nonsense", {}, ["'n'", "Nonsense"]),
    ("MatMul", {"inputs": ["x", "x"], "attrs": {"transpose_c": True}}, ["transpose_c", "Did you mean"]),
    ("MatMul", {"inputs": ["x", "x"], "attrs": {"T": "no_type"}}, ["'T'", "no_type"]),
    ("MatMul", {"inputs": ["x"]}, ["takes 2 inputs", "got 1"]),
    ("MatMul", {"inputs": ["x"], "attrs": {"T": tf.float32}}, ["takes 2 inputs", "got 1"]),
    ("Slice", {"inputs": ["x"] * 4}, ["takes 3 inputs", "got 4"]),
    ("DynamicStitch", {"inputs": ["x"] * 3}, ["'N'", "more than one way"]),
    ("NoOp", {"device": "/gpu:x:y"}, ["/gpu:x:y", "not a device"]),
    ("NoOp", {"attrs": {"_odd": object()}}, ["_odd"]),
])
def test_add_refuses(op_type, how, words):
    edit = StagedEdit(two_op_graph())
    with pytest.raises(GraphEditError) as error:
        edit.add(op_type, "n", **how)
    assert all(word in str(error.value) for word in words), error.value
    assert len(edit) == 0 and edit.commit() == {}


def test_commit_refuses_unknown_inputs_and_leaves_the_graph_alone():
    graph = two_op_graph()
    for inputs, control in ((["nowhere"], []), (["x:7"], []), (["x"], ["nowhere"])):
        edit = StagedEdit(graph)
        edit.add("Identity", "n", inputs, control_inputs=control, attrs={"T": tf.float32})
        with pytest.raises(GraphEditError, match="neither staged nor in the graph"):
            edit.commit()
    assert len(graph.get_operations()) == 4


def test_commit_reports_what_tensorflow_refuses():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    edit.const(np.zeros([3, 3], np.float32), "c")
    edit.add("MatMul", "bad", ["x", "c"])
    with pytest.raises(GraphEditError, match="(?s)refused.*bad"):
        edit.commit()
    assert len(graph.get_operations()) == 4


def test_edit_is_committed_once_and_not_into_a_finalized_graph():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    edit.const(1.0, "c")
    edit.commit()
    for again in (edit.commit, lambda: edit.const(1.0, "d")):
        with pytest.raises(GraphEditError, match="has been committed"):
            again()
    edit = StagedEdit(graph)
    edit.const(1.0, "d")
    graph.finalize()
    with pytest.raises(GraphEditError, match="finalized"):
        edit.commit()


def test_open_scopes_do_not_touch_new_ops():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    edit.add("Neg", "n", ["mul"])
    w, add = ops_named(graph, "w", "add")
    with graph.as_default(), tf.device("/cpu:1"), tf.name_scope("outer"), graph.colocate_with(w), \
            tf.control_dependencies([add]):
        (op,) = edit.commit().values()
    assert (op.name, op.device, list(op.control_inputs)) == ("n", "", [])
    assert op.colocation_groups() == [b"loc:@n"]


def test_control_inputs_between_new_and_old_ops_also_from_ops_without_outputs():
    graph = two_op_graph()
    with graph.as_default():
        ready = tf.no_op(name="ready")
    edit = StagedEdit(graph)
    edit.add("NoOp", "first", control_inputs=["ready", "mul", "ready"])
    edit.add("Neg", "last", ["add"], control_inputs=["first", "w"])
    new = edit.commit()
    assert [op.name for op in new["first"].control_inputs] == ["ready", "mul"]
    assert sorted(op.name for op in new["last"].control_inputs) == ["first", "w"]
    assert ready in new["first"].control_inputs


# ------------------------------------------------------------------------------------------------------------- clone
def test_clone_inside_goes_to_clones_outside_stays_and_input_map_leads_elsewhere():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    edit.add("Mul", "double", ["x", "two"], attrs={"T": tf.float32})
    edit.const(np.float32(2), "two")
    names = edit.clone(ops_named(graph, "mul", "add"), "copy", input_map={"x:0": "double"}, device="/device:CPU:1")
    new = edit.commit()
    assert names == {"mul": "copy/mul", "add": "copy/add"}
    assert [t.name for t in new["copy/mul"].inputs] == ["double:0", "w:0"]
    assert [t.name for t in new["copy/add"].inputs] == ["copy/mul:0", "w:0"]
    assert {new[name].device for name in names.values()} == {"/device:CPU:1"}
    value, original = run(graph, ["copy/add:0", "add:0"], {"x:0": [[1.0, 1.0]]})
    np.testing.assert_allclose(value, [[6.0, 9.0]])
    np.testing.assert_allclose(original, [[4.0, 6.0]])


def test_clone_of_a_clone_in_one_edit_and_input_map_inside_the_set():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    first = edit.clone(ops_named(graph, "mul", "add"), "a")
    edit.clone(ops_named(graph, "mul", "add"), "b", input_map={"x": first["add"], "mul:0": first["mul"] + ":0"})
    new = edit.commit()
    assert new["b/mul"].inputs[0].name == "a/add:0"
    assert new["b/add"].inputs[0].name == "a/mul:0"


def test_device_and_edit_as_functions_and_control_inputs():
    graph = two_op_graph()
    seen = []

    def halve(node, op):
        seen.append((node.name, op.name))
        if op.name == "w":
            node.attr["value"].tensor.CopyFrom(v1.make_tensor_proto(np.float32([1.0, 1.5])))

    edit = StagedEdit(graph, graph.as_graph_def())
    edit.clone(ops_named(graph, "w", "mul"), "half", edit=halve,
               device=lambda op: "/cpu:1" if op.type == "Mul" else None,
               control_inputs={"mul": ["add"]})
    new = edit.commit()
    assert seen == [("half/w", "w"), ("half/mul", "mul")]
    assert (new["half/w"].device, new["half/mul"].device) == ("", "/device:CPU:1")
    assert [op.name for op in new["half/mul"].control_inputs] == ["add"]
    np.testing.assert_allclose(run(graph, "half/mul:0", {"x:0": [[2.0, 2.0]]}), [[2.0, 3.0]])


def test_control_edges_of_clones():
    graph = two_op_graph()
    with graph.as_default():
        before = tf.no_op(name="before")
        with tf.control_dependencies([before, graph.get_operation_by_name("mul"), graph.get_operation_by_name("add")]):
            tf.no_op(name="after")
    ops = ops_named(graph, "mul", "after")

    def waits(**how):
        edit = StagedEdit(graph)
        name = edit.clone(ops, how.pop("prefix"), **how)["after"]
        return sorted(op.name for op in edit.commit()[name].control_inputs)

    assert waits(prefix="kept") == ["add", "before", "kept/mul"]
    assert waits(prefix="dropped", control_map={"before": None, "mul": None}) == ["add"]
    assert waits(prefix="moved", control_map={"before": "w", "add": "mul"}) == ["moved/mul", "mul", "w"]
    assert waits(prefix="more", control_inputs={"after": ["w", "add"]}) == ["add", "before", "more/mul", "w"]


def test_colocation_follows_into_the_clone_or_is_dropped():
    graph = two_op_graph()
    with graph.as_default():
        mul, w = ops_named(graph, "mul", "w")
        with graph.colocate_with(mul), graph.colocate_with(w):
            tf.identity(graph.get_tensor_by_name("add:0"), name="near")
    edit = StagedEdit(graph)
    edit.clone(ops_named(graph, "mul", "near"), "both", device="/cpu:1")
    edit.clone(ops_named(graph, "near"), "alone")
    new = edit.commit()
    assert new["both/near"].colocation_groups() == [b"loc:@both/mul"]
    assert new["both/near"].device == "/device:CPU:1"
    assert new["alone/near"].colocation_groups() == [b"loc:@alone/near"]


def test_clones_get_shapes_of_their_own_inputs():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [8, 3], name="x")
        v1.placeholder(tf.float32, [2, 3], name="quarter")
        tf.matmul(x, x, transpose_b=True, name="gram")
    edit = StagedEdit(graph, graph.as_graph_def(add_shapes=True))
    edit.clone(ops_named(graph, "gram"), "copy", input_map={"x": "quarter"})
    assert edit.commit()["copy/gram"].outputs[0].shape.as_list() == [2, 2]


@pytest.mark.parametrize("names, words", [
    (["mul"], ["'c/mul'", "taken"]),
    (["add"], ["'c/add'", "taken"]),
    (["x", "x"], ["more than once", "'x'"]),
])
def test_clone_refuses(names, words):
    graph = two_op_graph()
    with graph.as_default():
        tf.constant(1.0, name="c/mul")
    edit = StagedEdit(graph)
    edit.const(1.0, "c/add")
    with pytest.raises(GraphEditError) as error:
        edit.clone(ops_named(graph, *names), "c")
    assert all(word in str(error.value) for word in words), error.value


def test_clone_that_fails_leaves_nothing_staged():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    edit.const(1.0, "kept")
    with pytest.raises(GraphEditError, match="(?s)'c/mul'.*'other'.*`prefix`"):
        edit.clone(ops_named(graph, "w", "mul"), "c", edit=lambda node, op: setattr(
            node, "name", "other" if op.name == "mul" else node.name))
    with pytest.raises(GraphEditError, match="not a device"):
        edit.clone(ops_named(graph, "w", "mul"), "c", device=lambda op: "moon" if op.name == "mul" else None)
    assert sorted(edit.commit()) == ["kept"]


def test_copy_reads_and_waits_as_told_and_keeps_the_attributes():
    graph = two_op_graph()
    with graph.as_default():
        x = graph.get_tensor_by_name("x:0")
        with graph.colocate_with(ops_named(graph, "w")[0]), tf.control_dependencies(ops_named(graph, "add")):
            tf.matmul(x, x, transpose_b=True, name="gram")
    edit = StagedEdit(graph, graph.as_graph_def(add_shapes=True))
    two = edit.const(np.float32([[1, 2], [3, 4]]), "two")
    node = edit.copy(*ops_named(graph, "gram"), "small", [two, "two:0"], device="/cpu:1", control_inputs=["mul"])
    assert (node.name, list(node.input)) == ("small", ["two", "two", "^mul"])
    new = edit.commit()["small"]
    assert (new.device, new.colocation_groups()) == ("/device:CPU:1", [b"loc:@small"])
    assert new.outputs[0].shape.as_list() == [2, 2]
    np.testing.assert_allclose(run(graph, "small:0", {"x:0": [[1.0, 1.0]]}), [[5, 11], [11, 25]])


@pytest.mark.parametrize("op, name, device, words", [
    ("mul", "add", "", ["'add'", "taken"]),
    ("mul", "copy", "moon", ["not a device"]),
    ("loop/while/Enter", "copy", "", ["while loop", "clone()"]),
])
def test_copy_refuses(op, name, device, words):
    graph = two_op_graph()
    with graph.as_default(), control_flow(1):
        tf.while_loop(lambda i: i < 2, lambda i: i + 1, [tf.constant(0)], name="loop/while")
    edit = StagedEdit(graph)
    with pytest.raises(GraphEditError) as error:
        edit.copy(*ops_named(graph, op), name, ["x", "x"], device=device)
    assert all(word in str(error.value) for word in words), error.value
    assert len(edit) == 0


def test_clone_refuses_ops_of_another_graph():
    with pytest.raises(GraphEditError, match="another graph.*'mul'"):
        StagedEdit(tf.Graph()).clone(ops_named(two_op_graph(), "mul"), "c")


def test_node_gives_the_staged_nodedef():
    edit = StagedEdit(two_op_graph())
    name = edit.const(1.0, "c")
    edit.node(name).attr["_tag"].i = 7
    assert edit.commit()[name].get_attr("_tag") == 7
    with pytest.raises(GraphEditError, match="'none'"):
        edit.node("none")


# --------------------------------------------------------------------------- variables, gradients, iterators, functions
@pytest.mark.parametrize("resource", [False, True])
def test_forward_and_backward_clone_reads_the_same_variable(resource):
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        v1.placeholder(tf.float32, [None, 2], name="x2")
        w = variable("w", [[1.0, 2.0], [3.0, 4.0]], resource)
        loss = tf.reduce_sum(tf.tanh(tf.matmul(x, w)), name="loss")
        gradient = gradient_of(loss, w, "gradient")
        ops = [op for op in graph.get_operations() if op.name.split("/")[0] not in ("x", "x2", "w")]
        edit = StagedEdit(graph)
        names = edit.clone(ops, "copy", input_map={"x": "x2"}, device="/cpu:1")
        edit.commit()
        a, b = [[1.0, 0.5]], [[0.3, -1.0], [0.2, 0.1]]
        ours = run(graph, [names["loss"] + ":0", names[gradient.op.name] + ":0"], {"x2:0": b})
        theirs = run(graph, ["loss:0", gradient.name], {"x:0": b})
        for mine, expected in zip(ours, theirs):
            np.testing.assert_allclose(mine, expected, rtol=1e-6)
        assert run(graph, ["loss:0", names["loss"] + ":0"], {"x:0": a, "x2:0": a})[0] == pytest.approx(
            run(graph, "loss:0", {"x:0": a}))


@pytest.mark.parametrize("resource", [False, True])
def test_clone_of_a_variable_is_a_variable_of_its_own(resource):
    """Ref edges (Assign to VariableV2) and resource handles inside the clone; shared_name is the caller's to change."""
    graph = tf.Graph()
    with graph.as_default():
        w = variable("w", [1.0, 2.0], resource)
        step = tf.identity(w.assign_add([10.0, 10.0]), name="step")
        ops = list(graph.get_operations())

        def own_resource(node, op):
            if op.type == "VarHandleOp":
                node.attr["shared_name"].s = node.name.encode()

        edit = StagedEdit(graph)
        names = edit.clone(ops, "copy", edit=own_resource)
        edit.commit()
        with v1.Session(graph=graph) as session:
            session.run([w.initializer.name, names[w.initializer.name]])
            session.run(names[step.op.name])
            read = [op.name for op in ops if op.type in ("ReadVariableOp", "Identity") and op.name.startswith("w/")][0]
            np.testing.assert_allclose(session.run(names[read] + ":0"), [11.0, 12.0])
            np.testing.assert_allclose(session.run(read + ":0"), [1.0, 2.0])


@pytest.mark.parametrize("kind", ["one_shot", "initializable"])
def test_clones_pull_from_the_same_iterator(kind):
    graph = tf.Graph()
    with graph.as_default():
        dataset = tf.data.Dataset.range(8).batch(2)
        make = v1.data.make_one_shot_iterator if kind == "one_shot" else v1.data.make_initializable_iterator
        iterator = make(dataset)
        tf.identity(iterator.get_next(), name="next")
        pull = [op for op in graph.get_operations() if op.type == "IteratorGetNext"]
        edit = StagedEdit(graph)
        edit.clone(pull + ops_named(graph, "next"), "copy")
        edit.commit()
        with v1.Session(graph=graph) as session:
            session.run([op for op in graph.get_operations() if op.type == "MakeIterator"])
            seen = []
            for _ in range(2):
                seen += [list(value) for value in session.run(["next:0", "copy/next:0"])]
    assert sorted(seen) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.slow
def test_clone_of_a_function_call():
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [2], name="x")
        square_plus = tf.function(lambda t: t * t + 1.0)
        tf.identity(square_plus(x), name="y")
        calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
        constants = [op for op in graph.get_operations() if op.type == "Const"]
        edit = StagedEdit(graph)
        edit.add("Neg", "minus", ["x"])
        edit.clone(constants + calls + ops_named(graph, "y"), "copy", input_map={"x": "minus"})
        edit.commit()
    assert calls
    np.testing.assert_allclose(run(graph, "copy/y:0", {"x:0": [1.0, 3.0]}), [2.0, 10.0])


# ------------------------------------------------------------------------------------------------- existing ops, passes
def edges(graph):
    return {op.name: ([tensor.name for tensor in op.inputs], {wait.name for wait in op.control_inputs})
            for op in graph.get_operations()}


def test_edges_of_existing_ops_move_with_the_commit():
    graph = two_op_graph()
    with graph.as_default(), graph.control_dependencies(ops_named(graph, "mul", "w")):
        tf.no_op(name="after")
    before, edit = edges(graph), StagedEdit(graph)
    edit.const([5.0, 7.0], "v")
    edit.add("NoOp", "staged", control_inputs=["mul"])
    edit.move_input("add", 1, "v:0")
    edit.move_waits("after", ["mul"], ["v", "w"])
    edit.move_waits("add", [], ["after"])
    edit.move_waits("staged", ["mul"], ["x"])
    assert edges(graph) == before
    edit.commit()
    assert edges(graph) == dict(before, v=([], set()), staged=([], {"x"}), after=([], {"v", "w"}),
                                add=(["mul:0", "v:0"], {"after"}))
    np.testing.assert_allclose(run(graph, "add:0", {"x:0": [[1.0, 1.0]]}), [[7.0, 10.0]])


@pytest.mark.parametrize("target, message", [("v", "insert a Cast"), ("nothing", "neither staged nor in the graph")])
def test_edge_cannot_move_to_another_type_or_to_nothing(target, message):
    graph = two_op_graph()
    before, edit = edges(graph), StagedEdit(graph)
    edit.const([5, 7], "v")
    edit.move_input("add", 1, target)
    with pytest.raises(GraphEditError, match=message):
        edit.commit()
    assert edges(graph) == before


def test_ops_are_placed_with_the_commit():
    graph = two_op_graph()
    with graph.as_default(), graph.colocate_with(*ops_named(graph, "mul")):
        tf.no_op(name="near")
    edit, (mul, near) = StagedEdit(graph), ops_named(graph, "mul", "near")
    edit.clone([mul, near], "new")
    edit.place(mul, "/cpu:1")
    edit.place(near, "/cpu:2", alone=True)
    edit.place(edit.node("new/near"), "/cpu:3", alone=True)
    assert not mul.device and near.colocation_groups() == [b"loc:@mul"]
    new = edit.commit()
    assert [op.device for op in (mul, near, new["new/mul"], new["new/near"])] == [
        "/device:CPU:1", "/device:CPU:2", "", "/device:CPU:3"]
    assert near.colocation_groups() == [b"loc:@near"] and new["new/near"].colocation_groups() == [b"loc:@new/near"]


def test_attributes_that_are_left_out_have_their_defaults_in_the_graph_alone():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    edit.add("MatMul", "product", ["x", "x"])
    assert not edit.commit()["product"].get_attr("transpose_a") and "transpose_a" not in edit.node("product").attr
    given = v1.GraphDef(node=[v1.NodeDef(name="zero", op="NoOp"), v1.NodeDef(
        name="product", op="MatMul", input=["x", "x"], attr={"T": v1.AttrValue(type=tf.float32.as_datatype_enum)})])
    with tf.Graph().as_default():
        tf.import_graph_def(given, {"x": tf.zeros([2, 2])})
    assert "transpose_a" in given.node[1].attr  # other imports do as they did


def test_edit_goes_on_where_another_ended_and_clones_what_that_staged():
    graph = two_op_graph()
    before = edges(graph)
    first = StagedEdit.after(definitions_of(graph))
    first.const([5.0, 7.0], "v")
    first.add("Sub", "sub", ["mul", "v"])
    first.move_input("add", 0, "sub")
    first.move_waits("add", [], ["v"])
    definitions = first.definitions()
    with pytest.raises(GraphEditError, match="start a new StagedEdit"):
        first.commit()
    assert list(definitions.added) == ["v", "sub"] and list(definitions.changed) == ["add"]
    assert list(definitions.node("add").input) == ["sub", "w", "^v"] and definitions.node("sub").op == "Sub"
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(definitions.graph_def(), name="")
    for _ in range(2):  # one step may be tried again and again
        edit = StagedEdit.after(definitions)
        edit.clone([edit.node("sub"), *ops_named(graph, "add")], "copy", input_map={"w": "mul"})
        edit.move_input("add", 1, "v")
    assert edges(graph) == before
    edit.commit()
    assert edges(graph) == dict(edges(copy), **{"add": (["sub:0", "v:0"], {"v"}), "copy/sub": (["mul:0", "v:0"], set()),
                                                "copy/add": (["copy/sub:0", "mul:0"], {"v"})})


def test_clone_of_an_op_whose_edge_moves_has_the_moved_edge():
    graph = two_op_graph()
    with graph.as_default():
        for number in range(12):  # so many that one definition is looked up alone, and several by an export of the whole graph
            tf.no_op(name=f"other_{number}")
    edit = StagedEdit(graph)
    edit.move_input("add", 0, "x")
    edit.clone(ops_named(graph, "mul", "add"), "copy")
    edit.commit()
    assert edges(graph)["copy/add"] == (["x:0", "w:0"], set())


def test_node_is_staged_as_it_stands():
    graph = two_op_graph()
    edit = StagedEdit(graph)
    node = v1.NodeDef(name="third", op="Neg", input=["add"], attr={"T": v1.AttrValue(type=tf.float32.as_datatype_enum)})
    edit.insert(node)
    node.input[0] = "mul"
    with pytest.raises(GraphEditError, match="taken"):
        edit.insert(v1.NodeDef(name="mul", op="NoOp"))
    assert edit.dtypes("third") == [tf.float32] and edges(graph).keys() == {"x", "w", "mul", "add"}
    edit.commit()
    assert edges(graph)["third"] == (["add:0"], set())


def test_moves_that_fail_leave_every_edge_where_it_was():
    graph = tf.Graph()
    with graph.as_default():
        for name, rows in (("two", 2), ("also_two", 2), ("four", 4)):
            v1.placeholder(tf.float32, [rows, 3], name=name)
        for name in ("first", "second"):
            v1.raw_ops.Identity(input=graph.get_tensor_by_name("two:0"), name=name)
    before = edges(graph)
    edit = StagedEdit(graph)
    edit.move_input("first", 0, "also_two")
    edit.move_input("second", 0, "four")
    with pytest.raises(GraphEditError):
        edit.commit()
    assert edges(graph) == before
