"""EPL's ops, optimizer, profiler hooks and loader."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whale_tf as wh
from tests.epl.scripts import CLASSES, assert_same, batches, examples, layer, mean_loss, train, weights
from whale_tf import epl
from whale_tf._tf_compat import tf, v1
from whale_tf.epl import graph_profile, ops, profiler
from whale_tf.epl.config import Config
from whale_tf.epl.saver import ShardingLoader
from whale_tf.errors import AnnotationError

BATCH, STEPS = 4, 3


def optimizer() -> Any:
    return ops.AdamWeightDecayOptimizer(0.05, 0.1, exclude_from_weight_decay=["bias"])


def classifier(batch: int, count: int, strategy: bool) -> Any:
    if strategy:
        epl.set_default_strategy(epl.replicate(4))
    data = batches(count * batch * STEPS, batch, True)
    h = layer(data["x"], 8, "one")
    with epl.split(4) if strategy else v1.name_scope(""):
        h = ops.Replica2Split("features")(h)
        logits = ops.distributed_dense(h, CLASSES, kernel_initializer=v1.constant_initializer(
            np.linspace(-1.0, 1.0, 8 * CLASSES).reshape(8, CLASSES)), name="classes")
        return ops.distributed_sparse_softmax_cross_entropy_with_logits(tf.cast(data["y"], tf.int32), logits)


@pytest.mark.slow
def test_ops_under_split_train_the_local_numbers() -> None:
    epl.init(Config({"cluster.colocate_split_and_replicate": True}, {}))
    found = train(lambda: classifier(BATCH, 1, True), STEPS, optimizer)
    divided = wh.explain()
    wh.shutdown()
    assert_same(found, train(lambda: classifier(BATCH, 1, False), STEPS, optimizer), 1e-6)  # tf.losses compute in float32
    assert {"classes/kernel:0", "classes/bias:0", "beta1_power:0"} <= {*found.values} and "classes/MatMul" in divided


@pytest.mark.half
def test_optimizer_is_the_papers() -> None:
    """Against its formulas, with a variable that decays and one that does not."""
    data = examples(8)
    kernel, bias = (np.random.RandomState(sum(map(ord, name))).uniform(-0.5, 0.5, shape)
                    for name, shape in (("k", [6, CLASSES]), ("bias", [CLASSES])))

    def build() -> Any:
        x, y = tf.constant(data["x"]), tf.constant(data["y"])
        return mean_loss(tf.matmul(x, weights("k", [6, CLASSES])) + weights("bias", [CLASSES]), y)

    found = train(build, STEPS, optimizer)
    m, v = ({"k": np.zeros_like(kernel), "bias": np.zeros_like(bias)} for _ in range(2))
    values = {"k": kernel, "bias": bias}
    for step in range(1, STEPS + 1):
        logits = data["x"].dot(values["k"]) + values["bias"]
        share = np.exp(logits - logits.max(1, keepdims=True))
        error = (share / share.sum(1, keepdims=True) - np.eye(CLASSES)[data["y"]]) / len(data["y"])
        rate = 0.05 * np.sqrt(1 - 0.999 ** step) / (1 - 0.9 ** step)
        for name, gradient in (("k", data["x"].T.dot(error)), ("bias", error.sum(0))):
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.999 * v[name] + 0.001 * gradient ** 2
            decay = 0.1 * values[name] if name == "k" else 0.0
            values[name] = values[name] - rate * (m[name] / (np.sqrt(v[name]) + 1e-6) + decay)
    for name, value in values.items():
        np.testing.assert_allclose(found.values[name + ":0"], value, rtol=1e-4)  # of 1 - 0.999^t in float32


@pytest.mark.slow
@pytest.mark.half
def test_optimizer_of_a_look_up() -> None:
    def build(is_sparse: bool) -> Any:
        table, chosen = weights("table", [5, 3]), tf.constant([1, 3, 1])
        rows = tf.nn.embedding_lookup(table, chosen) if is_sparse else tf.matmul(tf.one_hot(chosen, 5, dtype=tf.float64), table)
        return tf.reduce_mean(tf.square(rows - 1.0))

    assert_same(train(lambda: build(True), STEPS, optimizer), train(lambda: build(False), STEPS, optimizer))


def test_argmax_and_equal() -> None:
    values = tf.constant([[1.0, 3.0], [5.0, 2.0]])
    found = ops.distributed_equal(ops.distributed_argmax(values, axis=1), tf.constant([1, 1]))
    with v1.Session() as session:
        assert session.run(found).tolist() == [True, False]
        assert session.run(ops.distributed_argmax(values, dimension=0)).tolist() == [1, 0]
    with pytest.raises(AnnotationError, match="no activity_regularizer"):
        ops.distributed_dense(values, 2, activity_regularizer=lambda one: one)


@pytest.mark.slow
def test_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_CLUSTER", "cpu:2")
    epl.init()
    epl.set_default_strategy(epl.replicate(1))
    data = batches(BATCH * 8, BATCH, True)
    loss = mean_loss(layer(data["x"], CLASSES, "one"), data["y"])
    step = v1.train.GradientDescentOptimizer(0.1).minimize(loss, v1.train.get_or_create_global_step())
    hooks = [profiler.MemoryProfilerHook(2, 2, str(tmp_path), dump_metadata=True), profiler.FlopsProfilerHook(["op", "graph"])]
    with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
        for _ in range(3):
            session.run(step)
        flops = profiler.profile_flops(session.graph and session, cmds="graph")
    assert not (tmp_path / "profile_step_1.json").exists() and not (tmp_path / "profile_step_3.json").exists()
    peaks = json.loads((tmp_path / "profile_step_2.json").read_text())
    assert {"device", "peak_memory", "persist"} <= set(peaks[0]) and all(one["peak_memory"] > 0 for one in peaks)
    assert (tmp_path / "run_metadata_2.pb").stat().st_size > 0
    each, sizes = graph_profile.profile_flops(), graph_profile.profile_memory()
    assert each["MatMul"] == 2 * BATCH * 6 * CLASSES and flops == sum(each.values()) > 2 * each["MatMul"]
    assert sizes["MatMul:0"] == 8 * BATCH * CLASSES
    for made, message in ((lambda: profiler.MemoryProfilerHook(3, 2), "at most max_steps"),
                          (lambda: profiler.FlopsProfilerHook("all"), "scope, op, graph")):
        with pytest.raises(AnnotationError, match=message):
            made()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [False, True])
def test_loader(strategy: bool, tmp_path: Path) -> None:
    """A variable under its own name, one under another, and a part of one, also in a graph that is divided."""
    with v1.Graph().as_default(), v1.Session() as session:
        saved = {name: weights(name, shape) for name, shape in (("k", [6, 4]), ("other", [4]), ("large", [10, 4]))}
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver(saved).save(session, str(tmp_path / "model"))
        values = session.run(saved)
    if strategy:
        epl.init()
    with v1.Graph().as_default():
        if strategy:
            epl.set_default_strategy(epl.replicate(4))
        data = batches(BATCH * 8, BATCH, True)
        shapes = {"k": [6, 4], "bias": [4], "part": [3, 4]}
        made = {name: v1.get_variable(name, shape, tf.float64, v1.zeros_initializer()) for name, shape in shapes.items()}
        names, parts = {"bias": "other", "part": "large"}, {"large": {"begin": [2, 0], "size": [3, 4]}}
        ShardingLoader(path, list(made.values()), names, parts).restore()
        logits = tf.matmul(data["x"], made["k"]) + made["bias"] + tf.reduce_sum(made["part"], 0)
        step = v1.train.GradientDescentOptimizer(0.0).minimize(mean_loss(logits, data["y"]))
        with v1.train.MonitoredTrainingSession() as session:
            session.run(step)
            found = session.run(made)
    for name, value in (("k", values["k"]), ("bias", values["other"]), ("part", values["large"][2:5])):
        np.testing.assert_array_equal(found[name], value)
    with v1.Graph().as_default():
        weights("k", [6, 5])
        with pytest.raises(AnnotationError, match="has \\[6, 4\\]; use assign_map"):
            ShardingLoader(path).restore()
        weights("none", [2])
        with pytest.raises(AnnotationError, match="is not there; use assign_map"):
            ShardingLoader(path, v1.global_variables()[1:]).restore()
