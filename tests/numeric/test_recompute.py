"""Activations computed again: the local numbers, less memory, and what is refused."""
from __future__ import annotations

import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric.trace import peak_bytes, traced

LAYERS, HIDDEN, BATCH = 8, 32, 64
SMALL = {"kind": "CPU", "fp32": 3e10, "memory_bandwidth_bytes_per_s": 1e10}


class Trained(NamedTuple):
    losses: List[float]
    variables: List[np.ndarray]
    peak: int


def build(scopes: Sequence[Any], dropout: bool = False, marks: bool = False) -> Dict[str, Any]:
    """Wide layers between narrow ones, in as many parts as there are scopes; float64."""
    random = np.random.RandomState(0)
    x = tf.placeholder(tf.float64, [BATCH, HIDDEN])
    h = x
    for part, scope in enumerate(scopes):
        with scope():
            for layer in range(LAYERS * part // len(scopes), LAYERS * (part + 1) // len(scopes)):
                up, down = (tf.get_variable(f"{name}_{layer}", initializer=random.randn(*shape) * 0.1)
                            for name, shape in (("up", (HIDDEN, 8 * HIDDEN)), ("down", (8 * HIDDEN, HIDDEN))))
                wide = tf.tanh(tf.matmul(h, up))
                if dropout:
                    wide = tf.nn.dropout(wide, rate=0.5, seed=layer)
                h = h + tf.matmul(wide * wide, down)
                if marks:
                    h = wh.checkpoint(h)
            if part == len(scopes) - 1:
                loss = tf.reduce_mean(tf.square(h - 1.0))
    return {"x": x, "loss": loss, "update": tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)}


def train(config: Optional[Dict[str, Any]], scopes: Sequence[Any] = (), cluster: Any = "cpu:2", plan: Any = None,
          **model: Any) -> Trained:
    """Four steps; ``config`` None: the local script."""
    feed = np.random.RandomState(1).randn(BATCH, HIDDEN)
    if config is not None:
        wh.init(config, cluster=cluster, plan=plan)
    try:
        with tf.Graph().as_default():
            tf.set_random_seed(0)
            made = build(scopes or [wh.replicate] if config is not None else [open_scope], **model)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                losses = [session.run([made["loss"], made["update"]], {made["x"]: feed})[0] for _ in range(4)]
                variables = session.run(tf.global_variables())
                metadata = traced(session, made["update"], {made["x"]: feed})
        return Trained(losses, variables, max(peak_bytes(metadata).values()))
    finally:
        if config is not None:
            wh.shutdown()


def open_scope() -> Any:
    return tf.name_scope("part")


def assert_equal(one: Trained, other: Trained) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-12)
    for a, b in zip(one.variables, other.variables):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def one_device() -> Any:
    return wh.replicate(1)


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("scopes, cluster, micro_batches", [
    ([one_device], "cpu:1", 1), ([lambda: wh.replicate(2)], "cpu:2", 2), ([one_device, one_device], "cpu:2", 4),
    ([lambda: wh.split(2)], "cpu:2", 1), ([one_device, lambda: wh.split(2)], "cpu:3", 2)],
    ids=["one", "replicas", "pipeline", "split", "pipeline-split"])
def test_local_numbers_under_every_kind_of_plan(scopes: Any, cluster: str, micro_batches: int) -> None:
    config = {"num_micro_batch": micro_batches}
    whole = train(config, scopes, cluster)
    again = train(dict(config, recompute="full"), scopes, cluster)
    assert_equal(again, train(None))
    assert again.peak < whole.peak


@pytest.mark.slow
@pytest.mark.graph_optimizer
def test_dropout_mask_is_drawn_once() -> None:
    """With the mask drawn anew the gradient would be of another function."""
    whole = train({"num_micro_batch": 2}, cluster="cpu:1", dropout=True)
    again = train({"num_micro_batch": 2, "recompute": "full"}, cluster="cpu:1", dropout=True)
    assert_equal(again, whole)
    assert again.peak < 0.8 * whole.peak


@pytest.mark.slow
@pytest.mark.graph_optimizer
def test_auto_keeps_what_there_is_room_for() -> None:
    """TensorFlow's graph optimizer must not merge what is computed again with what was dropped."""
    whole, least = train({}, cluster="cpu:1"), train({"recompute": "full"}, cluster="cpu:1")
    assert least.peak < 0.7 * whole.peak
    variables = sum(v.nbytes for v in least.variables)
    room = 2 * LAYERS * BATCH * 8 * HIDDEN * 8 * 7 // 12  # of what the layers make for the backward pass: two wide tensors each
    limit = variables + variables // 2 + room  # gradients are half of the variables, which are parameters and momentum
    small = {"device_types": {"Small": dict(SMALL, memory_bytes=limit)}, "nodes": [{"devices": ["Small"]}]}
    for _ in range(3):  # TensorFlow runs ready ops in another order each time
        found = train({"recompute": "auto"}, cluster=small)
        assert_equal(found, whole)
        assert found.peak + variables < limit
        assert least.peak < found.peak < 0.8 * whole.peak


@pytest.mark.slow
def test_marked_tensors_and_the_plan_as_json() -> None:
    wh.init({"recompute": "full"}, cluster="cpu:1")
    try:
        with tf.Graph().as_default():
            build([wh.replicate], marks=True)
            plan = wh.parallelize()
            text = wh.explain()
    finally:
        wh.shutdown()
    kept = plan.task_graphs[0].kept
    assert kept is not None and len(kept) == LAYERS and f"{LAYERS} tensor(s) are kept" in text
    assert_equal(train({}, cluster="cpu:1", plan=json.loads(plan.to_json()), marks=True), train(None))


def test_what_is_refused() -> None:
    tiny = {"device_types": {"Small": dict(SMALL, memory_bytes=1000)}, "nodes": [{"devices": ["Small"]}]}
    with pytest.raises(wh.InfeasibleError, match="needs .* bytes on a device even if it keeps as little as possible"):
        train({"recompute": "auto"}, cluster=tiny)
    with pytest.raises(wh.ConfigError, match="config key 'recompute' is 'some', expected"):
        wh.init({"recompute": "some"}, cluster="cpu:1")


def test_keeps_the_collection_checkpoints() -> None:
    wh.init({"gradient_checkpoint.type": "collection"}, cluster="cpu:1")
    try:
        with tf.Graph().as_default() as graph:
            build([wh.replicate], marks=False)
            tf.add_to_collection("checkpoints", graph.get_tensor_by_name("Tanh:0"))
            wh.parallelize()
            assert wh.current_plan().task_graphs[0].kept == ("Tanh:0",)
    finally:
        wh.shutdown()


def test_mark_that_is_no_activation() -> None:
    wh.init({"recompute": "full"}, cluster="cpu:1")
    try:
        with tf.Graph().as_default():
            wh.checkpoint(tf.constant(1.0, name="alone"))
            build([wh.replicate])
            with pytest.raises(wh.ConfigError, match="wh.checkpoint marks 'alone:0', which is not an activation"):
                wh.parallelize()
    finally:
        wh.shutdown()


def test_step_with_nothing_to_compute_again() -> None:
    def ready(x: Any, **config: str) -> Any:
        wh.init(config, cluster="cpu:1")
        with tf.Graph().as_default():
            product = tf.matmul(x(), tf.get_variable("w", [4, 1]))
            tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(product))
            return wh.parallelize()

    try:
        with pytest.raises(wh.ConfigError, match="recompute is 'full', but no op of this step follows.*set recompute"):
            ready(lambda: tf.get_variable("x", [8, 4]), recompute="full")
        ready(lambda: tf.get_variable("x", [8, 4]), recompute="auto")
        with pytest.warns(UserWarning, match="recompute is 'full', but the backward pass reads nothing that forward ops could"):
            plan = ready(lambda: tf.placeholder(tf.float32, [None, 4]), recompute="full")
        assert plan.task_graphs[0].kept is None
    finally:
        wh.shutdown()
