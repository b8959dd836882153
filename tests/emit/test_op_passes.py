"""Passes over ops: what they say of the new step is what capture reads of a graph in which it was carried out."""
from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from models.optimizers import Adafactor
from tests.emit.test_untouched import dense, model, state
from whale_tf.capture.captured import captured_from
from whale_tf.capture.record import record
from whale_tf.capture.recording import Recording, recording_of
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decision import Request
from whale_tf.decide.split import carry_out, divide
from whale_tf.graph_editor import StagedEdit
from whale_tf.ir.batch_axis import Options
from whale_tf.ir.graph import Op, OpGraph, Phase, Shape
from whale_tf.transforms.batch_norm import sync_batch_norm


def normalised() -> None:
    model(wh.replicate(1), wh.split(2))


def tokens() -> None:
    """Look-ups in a divided table, a loss over classes of an unknown number of examples, factored moments, a penalty."""
    ids = tf.placeholder("int32", [None, 5])
    label = tf.placeholder("int32", [None])
    with wh.split(2):
        table = tf.get_variable("table", [30, 6])
        x = tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 30])
        logits = dense(tf.nn.softmax(dense(x, 10, "hidden")), 12, "classes")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
        loss += 0.1 * tf.nn.l2_loss(table)
    Adafactor(0.1).minimize(loss)
    tf.train.Saver()


def passed(graph: tf.Graph, init: str) -> List[Recording]:
    """The step after each pass that changes it."""
    steps = [recording_of(graph)]
    normal = sync_batch_norm(steps[0])
    if normal is not steps[0]:
        steps.append(normal)
    local = captured_from(normal)
    cluster = Cluster.parse(f"cpu:{sum(spec.device_count or 1 for spec in local.specs)}")
    division = divide(local, Request(cluster, Config.parse({"init": init}), options=Options(sync=lambda op: True)))
    divided = carry_out(division).captured.recording
    assert divided is not None
    return [*steps, divided]


def facts(ops: OpGraph, op: Op) -> Tuple:
    inputs = [ops.tensor_name(tensor) for tensor in op.inputs]
    attrs = {name: repr(value) for name, value in op.attrs.items() if not name.startswith("_whale")}  # tags
    dtypes = [ops.tensors[tensor].dtype for tensor in op.outputs]
    return op.type, inputs, {ops.ops[wait].name for wait in op.control_inputs}, attrs, dtypes, op.device, repr(op.value)


def says_no_less(shape: Shape, inferred: Shape) -> bool:
    if shape is None or inferred is None:
        return inferred is None
    return len(shape) == len(inferred) and all(theirs in (None, ours) for ours, theirs in zip(shape, inferred))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["exact", "sharded"])
@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("build", [normalised, tokens])
def test_step_is_what_capture_would_read(build: Any, resource: bool, init: str) -> None:
    wh.init({}, cluster="cpu:3")
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope(
                "", use_resource=resource, initializer=tf.random_uniform_initializer(seed=3)):
            build()
            before = state(graph)
            steps = passed(graph, init)
            assert state(graph) == before and len(steps) == (3 if build is normalised else 2)
            StagedEdit.after(steps[-1].definitions).commit()
            told, read = steps[-1].graph, record(graph)
    finally:
        wh.shutdown()
    assert {op.name for op in told.ops} <= {op.name for op in read.ops} and len(told.ops) > 200
    place = {op.name: i for i, op in enumerate(read.ops)}
    shared = [op.name for op in told.ops]
    assert shared == sorted(shared, key=place.__getitem__)
    for op in told.ops:
        other = read.op(op.name)
        assert facts(told, op) == facts(read, other), op.name
        if op.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.APPLY):
            for ours, theirs in zip(op.outputs, other.outputs):
                assert says_no_less(told.tensors[ours].shape, read.tensors[theirs].shape), told.tensor_name(ours)
