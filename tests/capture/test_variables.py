"""Who reads, writes and initialises a variable."""
from __future__ import annotations

from typing import Any, Set, Tuple

import pytest
import tensorflow as tf

from tests.capture.models import MODELS, dense, placeholder
from whale_tf.capture.record import record
from whale_tf.capture.variables import Variable, Variables, find_variables, home_variable
from whale_tf.ir.graph import OpGraph

v1 = tf.compat.v1


def of(graph: Any, name: str) -> Tuple[OpGraph, Variables, Variable]:
    ops = record(graph)
    variables = find_variables(ops)
    return ops, variables, variables[ops.op(name).id]


def names(ops: OpGraph, numbers: Any) -> Set[str]:
    return {ops.ops[number].name for number in numbers}


@pytest.mark.parametrize("resource", [False, True])
def test_reads_writes_and_initializer(graph: Any, resource: bool) -> None:
    with v1.variable_scope("", use_resource=resource):
        v = v1.get_variable("v", [3, 2], tf.float64)
    y = v * 2.0
    v1.assign_add(v, tf.ones([3, 2], tf.float64), name="more")
    v1.assign(v, tf.zeros([3, 2], tf.float64), name="reset")
    v1.global_variables_initializer()
    ops, variables, variable = of(graph, "v")
    assert (variable.name, variable.shape, variable.dtype) == ("v", (3, 2), "float64")
    assert variable.is_resource == resource
    assert len(variable.writes) == 3
    assert ops.ops[variable.initializer].name == "v/Assign"
    value = ops.producer(ops.op(y.op.name).inputs[0]).id
    assert value in variable.reads
    assert variables.read_by[value] == [variable.op]
    assert all(variables.written_by[write] == [variable.op] for write in variable.writes)
    assert {ops.ops[read].type for read in variable.reads} == {"ReadVariableOp" if resource else "Identity"}


@pytest.mark.parametrize("resource", [False, True])
def test_queries_are_no_reads(graph: Any, resource: bool) -> None:
    with v1.variable_scope("", use_resource=resource):
        v = v1.get_variable("v", [3])
    v1.is_variable_initialized(v)
    ops, _, variable = of(graph, "v")
    kinds = {ops.ops[op].type for op in variable.reads + variable.writes}
    assert not kinds & {"VarIsInitializedOp", "IsVariableInitialized"}


def test_first_plain_assign_initialises_a_raw_variable(graph: Any) -> None:
    ref = tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32, name="raw")
    tf.raw_ops.Assign(ref=ref, value=tf.zeros([2]), name="start")
    tf.raw_ops.AssignAdd(ref=ref, value=tf.ones([2]), name="more")
    ops, _, variable = of(graph, "raw")
    assert ops.ops[variable.initializer].name == "start"
    tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32, name="never")
    assert of(graph, "never")[2].initializer == -1


@pytest.mark.parametrize("resource", [False, True])
def test_optimizer_slots(graph: Any, resource: bool) -> None:
    with v1.variable_scope("", use_resource=resource):
        MODELS["mlp"]()
    ops, variables, weight = of(graph, "hidden/w")
    assert names(ops, weight.slots) == {"hidden/w/Adam", "hidden/w/Adam_1"}
    assert variables[ops.op("hidden/w/Adam").id].slots == ()
    apply = next(op for op in weight.writes if ops.ops[op].type.endswith("ApplyAdam"))
    assert names(ops, variables.written_by[apply]) == {"hidden/w", "hidden/w/Adam", "hidden/w/Adam_1"}
    power = variables[ops.op("beta1_power").id]
    assert apply not in power.writes
    if not resource:
        assert names(ops, power.reads) == {"beta1_power/read", "saver/SaveV2"}


def test_references_are_followed(graph: Any) -> None:
    """Through the output of an Assign, RefSwitch and RefEnter."""
    ref = tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32, name="raw")
    assigned = tf.raw_ops.Assign(ref=ref, value=tf.zeros([2]), name="start")
    tf.raw_ops.Identity(input=assigned, name="after")
    switched, _ = tf.raw_ops.RefSwitch(data=ref, pred=placeholder([], "p", tf.bool), name="switch")
    tf.raw_ops.AssignAdd(ref=switched, value=tf.ones([2]), name="inside")
    entered = tf.raw_ops.RefEnter(data=ref, frame_name="frame", name="enter")
    tf.raw_ops.Identity(input=entered, name="in_frame")
    ops, _, variable = of(graph, "raw")
    assert names(ops, variable.reads) == {"after", "in_frame"}
    assert names(ops, variable.writes) == {"start", "inside"}
    assert ops.tensor("switch:1") in variable.aliases


def test_reference_that_is_only_a_value_is_a_read(graph: Any) -> None:
    target = tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32, name="target")
    source = tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32, name="source")
    tf.raw_ops.Assign(ref=target, value=source, name="copy")
    ops, variables, variable = of(graph, "source")
    assert names(ops, variable.reads) == {"copy"}
    assert variable.writes == ()
    assert names(ops, variables[ops.op("target").id].writes) == {"copy"}


@pytest.mark.parametrize("functional", [False, True])
def test_uses_inside_control_flow(graph: Any, control_flow: Any, functional: bool) -> None:
    control_flow(functional)
    with v1.variable_scope("", use_resource=True):
        read, written = v1.get_variable("read", []), v1.get_variable("written", [])
    v1.while_loop(lambda i: i < 3.0, lambda i: i + read, [0.0], name="loop")
    v1.cond(placeholder([], "p", tf.bool), lambda: written.assign_add(1.0).op, tf.no_op, name="condition")
    ops, variables, variable = of(graph, "read")
    user = "loop" if functional else "loop/add"
    reads = {ops.ops[op].name.split("/ReadVariableOp")[0] for op in variable.reads}
    assert user in reads
    assert set(variable.writes) == {variable.initializer}
    _, _, variable = of(graph, "written")
    others = set(variable.writes) - {variable.initializer}
    assert {ops.ops[op].type for op in others} == ({"If"} if functional else {"AssignAddVariableOp"})


def test_gathers_read_and_scatters_write(graph: Any) -> None:
    with v1.variable_scope("", use_resource=True):
        table = v1.get_variable("table", [5, 2])
    tf.nn.embedding_lookup(table, [1, 2])
    v1.scatter_update(table, [0], [[1.0, 1.0]])
    ops, _, variable = of(graph, "table")
    assert "ResourceGather" in {ops.ops[op].type for op in variable.reads}
    assert {ops.ops[op].type for op in variable.writes} == {"AssignVariableOp", "ResourceScatterUpdate"}


@pytest.mark.parametrize("resource", [False, True])
def test_home_variable(graph: Any, resource: bool) -> None:
    with v1.variable_scope("", use_resource=resource):
        y = dense(placeholder(), 2, "a")
    ops, variables, weight = of(graph, "a/w")
    value = ops.op("a/MatMul").inputs[1]
    assert home_variable(ops, variables, ops.tensor("a/w:0")) == weight.op
    assert home_variable(ops, variables, value) == weight.op
    assert home_variable(ops, variables, ops.tensor(y.name)) is None


def test_local_variables_of_functions_are_not_listed(graph: Any) -> None:
    v1.get_variable("v", [1])
    assert {variable.name for variable in find_variables(record(graph))} == {"v"}
