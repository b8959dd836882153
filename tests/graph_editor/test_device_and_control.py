"""Devices, colocation and control edges."""
from __future__ import annotations

import pytest

from tests.graph_editor.graphs import run
from whale_tf._tf_compat import tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor import (
    add_control_inputs,
    barrier,
    by_device,
    canonical_device,
    colocated_with,
    drop_colocation,
    merge_device,
    order,
    place,
    remove_control_inputs,
)


@pytest.fixture
def ops():
    """Constants a to f; ``near`` = -a, colocated with a."""
    graph = tf.Graph()
    with graph.as_default():
        for name in "abcdef":
            tf.constant(1.0, name=name)
        with graph.colocate_with(graph.get_operation_by_name("a")):
            tf.negative(graph.get_tensor_by_name("a:0"), name="near")
    return {op.name: op for op in graph.get_operations()}


def names(found):
    return [op.name for op in found]


# ------------------------------------------------------------------------------------------------------------ device
def test_place_and_by_device(ops):
    place([ops["a"], ops["b"]], "/cpu:1")
    place(ops.values(), lambda op: {"c": "/job:worker/cpu:0", "b": ""}.get(op.name))
    groups = {device: names(members) for device, members in by_device(ops.values()).items()}
    assert groups == {"/device:CPU:1": ["a"], "/job:worker/device:CPU:0": ["c"], "": ["b", "d", "e", "f", "near"]}


def test_placed_op_leaves_its_colocation_group(ops):
    assert colocated_with(ops["near"]) == ["a"] and colocated_with(ops["a"]) == []
    place([ops["near"]], "/cpu:1", keep_colocation=True)
    assert colocated_with(ops["near"]) == ["a"]
    place([ops["near"]], "/cpu:1")
    place([ops["a"]], "/cpu:0")
    assert colocated_with(ops["near"]) == []
    options = v1.RunOptions(output_partition_graphs=True)
    metadata = v1.RunMetadata()
    with v1.Session(graph=ops["a"].graph, config=v1.ConfigProto(
            device_count={"CPU": 2}, graph_options=v1.GraphOptions(rewrite_options=_no_rewrites()))) as session:
        assert session.run("near:0", options=options, run_metadata=metadata) == -1.0
    placed = {node.name: node.device for graph in metadata.partition_graphs for node in graph.node}
    assert placed["near"].endswith("CPU:1") and placed["a"].endswith("CPU:0")


def _no_rewrites():
    options = v1.GraphOptions().rewrite_options
    options.disable_meta_optimizer = True
    return options


def test_drop_colocation_leaves_others_alone(ops):
    drop_colocation(ops.values())
    assert all(colocated_with(op) == [] for op in ops.values())


def test_device_names(ops):
    assert canonical_device("/cpu:0") == "/device:CPU:0" and canonical_device("") == ""
    place([ops["a"]], "/job:worker/device:GPU:0")
    assert merge_device(ops["a"], "/task:1/device:GPU:2") == "/job:worker/task:1/device:GPU:2"
    assert merge_device(ops["b"], "/cpu:1") == "/device:CPU:1"
    for refused in (lambda: place([ops["a"]], "gpu zero"), lambda: merge_device(ops["a"], "gpu zero")):
        with pytest.raises(GraphEditError, match="'gpu zero' is not a device"):
            refused()


# ----------------------------------------------------------------------------------------------------------- control
def test_add_and_remove_control_inputs(ops):
    add_control_inputs(ops["d"], [ops["a"], ops["b"], ops["a"]])
    add_control_inputs(ops["d"], [ops["b"], ops["c"]])
    assert names(ops["d"].control_inputs) == ["a", "b", "c"]
    assert names(remove_control_inputs(ops["d"], [ops["b"], ops["e"]])) == ["b"]
    assert names(ops["d"].control_inputs) == ["a", "c"]
    assert names(remove_control_inputs(ops["d"])) == ["a", "c"]
    assert names(ops["d"].control_inputs) == [] and remove_control_inputs(ops["d"]) == []


def test_control_inputs_that_are_refused(ops):
    with pytest.raises(GraphEditError, match="'d' cannot wait for itself"):
        add_control_inputs(ops["d"], [ops["a"], ops["d"]])
    with tf.Graph().as_default():
        foreign = tf.no_op(name="foreign")
    with pytest.raises(GraphEditError, match="'foreign' is not in the graph of 'd'"):
        add_control_inputs(ops["d"], [ops["a"], foreign])
    assert names(ops["d"].control_inputs) == []


def test_order_of_many_goes_through_a_gate(ops):
    with ops["a"].graph.as_default(), tf.control_dependencies([ops["e"]]):
        gate = order([ops["a"], ops["b"], ops["c"]], [ops["d"], ops["f"]], "gate")
    assert (gate.name, gate.type, names(gate.control_inputs)) == ("gate", "NoOp", ["a", "b", "c"])
    assert [names(ops[name].control_inputs) for name in "df"] == [["gate"], ["gate"]]
    assert run(ops["a"].graph, "d:0") == 1.0


def test_order_of_few_is_direct(ops):
    assert order([ops["a"], ops["b"]], [ops["d"]]) is None
    assert order([ops["a"]], []) is None and order([], [ops["a"]]) is None
    assert names(ops["d"].control_inputs) == ["a", "b"]


def test_order_refuses_cycles(ops):
    order([ops["a"]], [ops["b"]])
    with pytest.raises(GraphEditError, match=r"'a' cannot wait for \['b'\]"):
        order([ops["b"]], [ops["c"], ops["a"]])
    assert names(ops["c"].control_inputs) == []


def test_barrier(ops):
    gate = barrier([ops["a"], ops["b"]], "gate", device="/cpu:1")
    assert (names(gate.control_inputs), gate.device) == (["a", "b"], "/device:CPU:1")
    with pytest.raises(GraphEditError, match="at least one op"):
        barrier([], "gate")
