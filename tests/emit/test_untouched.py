"""Nothing edits the graph before a plan is carried out: an error leaves no trace, and neither does asking for the Program."""
from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Tuple, Type

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.capture.annotations import annotations_of
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.errors import ConfigError, PlanError, UnsupportedOpError, WhaleError
from whale_tf.parallelize import find_lowered

pytestmark = pytest.mark.half
BATCH = 8


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    kernel = tf.get_variable(name, [int(x.shape[-1]), units], initializer=tf.glorot_uniform_initializer(seed=1))
    return tf.matmul(x, kernel)


def normalised(x: tf.Tensor, name: str) -> tf.Tensor:
    channels = int(x.shape[-1])
    scale = tf.get_variable(name + "/scale", [channels], initializer=tf.ones_initializer())
    offset = tf.get_variable(name + "/offset", [channels], initializer=tf.zeros_initializer())
    return tf.nn.fused_batch_norm(x, scale, offset)[0]


def model(first: Any, then: Any, units: int = 6) -> Tuple[tf.Tensor, tf.Tensor]:
    """A normalised layer under the first annotation, a classifier under the second; returns the input and the update."""
    x = tf.placeholder("float32", [BATCH, 2, 2, 3], name="x")
    label = tf.placeholder("int32", [BATCH], name="label")
    with first:
        h = normalised(tf.reshape(dense(tf.reshape(x, [-1, 3]), 4, "features"), [-1, 2, 2, 4]), "norm")
    with then:
        logits = dense(tf.reduce_mean(tf.tanh(h), [1, 2]), units, "classes")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    update = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=tf.train.get_or_create_global_step())
    tf.summary.scalar("loss", loss)
    tf.train.Saver()
    tf.global_variables_initializer()
    return x, update


def in_a_loop() -> None:
    with wh.replicate(1):
        x = tf.placeholder("float32", [BATCH, 2, 2, 3])
        h = tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, normalised(h, "inside")), [0, normalised(x, "outside")])[1]
        tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(h))


class Case(NamedTuple):
    """``build`` makes a graph that cannot run under ``config`` on ``cluster``."""

    build: Callable[[], Any]
    error: Type[WhaleError]
    message: str
    config: Dict[str, Any] = {}
    cluster: str = "cpu:3"


SYNC = {"sync_batch_norm": True}
CASES = {
    "an indivisible batch": Case(
        lambda: model(wh.replicate(1), wh.split(2)), PlanError, "does not divide over 3 parts", dict(SYNC, num_micro_batch=3)),
    "an indivisible batch without split": Case(
        lambda: model(wh.replicate(1), wh.replicate(3)), PlanError, "does not divide over 3 parts", SYNC, "cpu:4"),
    "a pattern that the op does not have": Case(
        lambda: model(wh.replicate(1), wh.split(2)), WhaleError, "MatMul_1", dict(SYNC, **{
            "patterns.force": {"MatMul_1": "no such pattern"}})),
    "batch normalisation in a loop": Case(in_a_loop, UnsupportedOpError, "is inside", SYNC, "cpu:2"),
    "more devices than there are": Case(lambda: model(wh.replicate(2), wh.split(3)), WhaleError, "devices", SYNC),
    "annotations under rhino": Case(
        lambda: model(wh.replicate(1), wh.split(2)), ConfigError, "annotations", dict(SYNC, **{"auto.auto_parallel": "rhino"})),
}


def state(graph: tf.Graph) -> Any:
    """All that a user could see of a graph."""
    graph_def = graph.as_graph_def(add_shapes=True)
    nodes = {node.name: node.SerializeToString(deterministic=True) for node in graph_def.node}
    collections = {name: list(graph.get_collection_ref(name)) for name in graph.get_all_collection_keys()}
    calls = [(call.ys, call.xs, call.grads) for call in annotations_of(graph).gradient_calls]
    return nodes, graph_def.library.SerializeToString(deterministic=True), collections, calls, graph.version


@pytest.mark.slow
@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_error_leaves_the_graph_as_it_was(name: str, resource: bool) -> None:
    case = CASES[name]
    wh.init(case.config, cluster=case.cluster)
    try:
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=resource):
            case.build()
            before = state(graph)
            for _ in range(2):
                with pytest.raises(case.error, match=case.message):
                    wh.parallelize()
                assert state(graph) == before
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_after_an_error_the_graph_trains_as_the_local_script() -> None:
    def train(is_refused: bool) -> Any:
        with tf.Graph().as_default():
            x, update = model(wh.replicate(1) if is_refused else tf.name_scope(""),
                              wh.split(2) if is_refused else tf.name_scope(""))
            if is_refused:
                with pytest.raises(PlanError):
                    wh.parallelize()
                wh.shutdown()
            random = np.random.RandomState(0)
            feed = {x: random.randn(BATCH, 2, 2, 3), "label:0": random.randint(0, 6, BATCH)}
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run([update] * 3, feed)
                return session.run(tf.trainable_variables())

    wh.init(dict(SYNC, num_micro_batch=3), cluster="cpu:3")
    try:
        refused = train(True)
    finally:
        wh.shutdown()
    for value, expected in zip(refused, train(False)):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["replicate", "split"])
def test_program_is_found_without_a_rewrite(second: str) -> None:
    settings = dict(SYNC, num_micro_batch=2)
    wh.init(settings, cluster="cpu:3")
    try:
        with tf.Graph().as_default() as graph:
            model(wh.replicate(1), wh.split(2) if second == "split" else wh.replicate(2))
            before = state(graph)
            shown = find_lowered(graph, Cluster.parse("cpu:3"), Config.parse(settings))
            assert shown is not None and state(graph) == before
            wh.parallelize()
            emitted = wh.current_program()
            assert emitted is not None and emitted.to_text() == shown.program.to_text()
            names = {emitted.graph.ops[op].name for body in emitted.bodies for op in body.ops}
            assert any("/decomposed/" in name for name in names)
            assert any(name.startswith("shards/1/") for name in names) == (second == "split")
    finally:
        wh.shutdown()
