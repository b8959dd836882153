"""Strategies and collections of a training script, against the local numbers."""
from __future__ import annotations

from typing import Any, Dict, Optional

import numpy as np
import pytest

import whale_tf as wh
from tests.epl.scripts import CLASSES, assert_same, batches, examples, layer, mean_loss, train
from whale_tf import epl
from whale_tf._tf_compat import tf, v1
from whale_tf.epl.config import Config
from whale_tf.errors import AnnotationError, UnsupportedOpError

BATCH, STEPS = 4, 3
KEYS = epl.GraphKeys


def three_layers(batch: int, count: int, strategy: bool) -> Any:
    """A model that opens a TaskGraph for each of two layers by calling set_default_strategy again and again."""
    if strategy:
        epl.set_default_strategy(epl.replicate(1, name="stage"))
    data = batches(count * batch * STEPS, batch, True)
    h = layer(data["x"], 8, "one")
    if strategy:
        epl.set_default_strategy(epl.replicate(device_count=1, name="stage"))
    return mean_loss(layer(h, CLASSES, "two"), data["y"])


@pytest.mark.slow
def test_default_strategies_are_stages() -> None:
    epl.init(Config({"pipeline.num_micro_batch": 2}, {}))
    found = train(lambda: three_layers(BATCH, 4, True), STEPS)
    plan = wh.current_plan()
    assert plan is not None and [task.devices for task in plan.task_graphs] == [((0,), (2,)), ((1,), (3,))]
    assert plan.nested_batch == "micro" and plan.num_micro_batch == 2
    wh.shutdown()
    assert_same(found, train(lambda: three_layers(4 * BATCH, 1, False), STEPS))


@pytest.mark.slow
@pytest.mark.half
def test_replicate_and_split_on_the_same_devices() -> None:
    epl.init(Config({"cluster.colocate_split_and_replicate": True}, {}))
    total = epl.Env.get().cluster.total_gpu_num

    def model() -> Any:
        with epl.replicate(total):
            data = batches(BATCH * STEPS, BATCH, True)
            h = layer(data["x"], 8, "one")
        with epl.split(total):
            return mean_loss(layer(h, CLASSES, "two"), data["y"])

    found = train(model, STEPS)
    assert [task.strategy for task in wh.current_plan().task_graphs[:2]] == ["replicate", "split"]  # type: ignore[union-attr]
    wh.shutdown()
    assert_same(found, train(lambda: three_layers(BATCH, 1, False), STEPS))


def test_nested_strategies_are_refused() -> None:
    epl.init()
    with pytest.raises(AnnotationError, match="do not nest"), epl.replicate(1), epl.split(1):
        pass
    assert epl.split(2).device_count == 2 and repr(epl.replicate(3)) == "strategy('Replicate', device_count=3, is_default=False)"


def fetched(emit: str, config: Dict[str, Any], train_too: bool = True) -> Dict[str, Any]:
    """Values of tensors of each kind in each collection, inside of what is differentiated and outside of it."""
    import os

    os.environ["WHALE_CONFIG"] = '{"emit": "%s"}' % emit
    try:
        epl.init(Config(config, {}))
    finally:
        del os.environ["WHALE_CONFIG"]
    with v1.Graph().as_default():
        epl.set_default_strategy(epl.replicate(1))
        data = batches(BATCH * 16, BATCH, False)
        terms, asked = [], {}
        for kind in ("mean", "sum", "concat"):
            for level in ("global", "local"):
                key = getattr(KEYS, f"{level}_{kind}_objects".upper())
                h = layer(data["x"], CLASSES, "one") if not terms else tf.tanh(
                    tf.matmul(data["x"], v1.trainable_variables()[0]) + v1.trainable_variables()[1])
                inside = {"mean": {"mean": tf.reduce_mean(h), "total": tf.reduce_sum(h), "ratio": v1.losses.mean_squared_error(
                    v1.one_hot(data["y"], CLASSES, dtype=tf.float64), h)}, "concat": {"rows": h}}
                for name, tensor in inside["concat" if kind == "concat" else "mean"].items():
                    terms.append(tf.reduce_sum(tf.cast(tensor, tf.float64)))
                    asked[f"{level} {kind} {name}"] = tensor
                    epl.add_to_collection(tensor, key)
        outside = {"global mean correct": tf.reduce_mean(tf.cast(tf.equal(tf.argmax(h, 1), data["y"]), tf.float64)),
                   "global sum right": tf.reduce_sum(tf.cast(tf.equal(tf.argmax(h, 1), data["y"]), tf.int32))}
        for name, tensor in outside.items():
            epl.add_to_collection(tensor, f"{name.split()[0]}_{name.split()[1]}_objects")
        epl.add_to_collection([data["x"]], KEYS.GLOBAL_CONCAT_OBJECTS)
        asked.update(outside, x=data["x"])
        step = v1.train.GradientDescentOptimizer(0.0).minimize(tf.add_n(terms))
        with v1.train.MonitoredTrainingSession() as session:
            return session.run([asked, step] if train_too else [asked])[0]


@pytest.mark.slow
@pytest.mark.half
@pytest.mark.parametrize("emit, config, cluster", [
    ("inline", {"pipeline.num_micro_batch": 2}, "cpu:2"), ("call", {"pipeline.num_micro_batch": 2}, "cpu:2"),
    ("inline", {}, "cpu:4"), ("inline", {}, "cpu:1")])
def test_collections(emit: str, config: Dict[str, Any], cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if emit == "call":
        v1.enable_resource_variables()
    monkeypatch.setenv("WHALE_CLUSTER", cluster)
    replicas, micro = int(cluster[-1]), config.get("pipeline.num_micro_batch", 1)
    found, count = fetched(emit, config), replicas * micro
    data = examples(BATCH * 16)
    x, y = (data[name][:count * BATCH] for name in "xy")
    random = {name: np.random.RandomState(sum(map(ord, name))).uniform(-0.5, 0.5, shape)
              for name, shape in (("one_kernel", [6, CLASSES]), ("one_bias", [CLASSES]))}
    h = np.tanh(x.dot(random["one_kernel"]) + random["one_bias"])
    error = (np.eye(CLASSES)[y] - h) ** 2
    of_each = {"mean": h, "total": h, "ratio": error}
    for level, first in (("global", count), ("local", micro)):
        parts = {name: np.split(value, count)[:first] for name, value in of_each.items()}
        values = {name: [part.sum() if name == "total" else part.mean() for part in each] for name, each in parts.items()}
        for name, each in values.items():
            np.testing.assert_allclose(found[f"{level} mean {name}"], np.mean(each), rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(found[f"{level} sum {name}"], np.sum(each), rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(found[f"{level} concat rows"], np.concatenate(parts["mean"]), rtol=1e-9)
    np.testing.assert_allclose(found["x"], x)
    assert found["global sum right"] == np.sum(h.argmax(1) == y)
    np.testing.assert_allclose(found["global mean correct"], np.mean(h.argmax(1) == y), rtol=1e-12)


def refused(key: str, make: Any, devices: Optional[int] = None, is_trained: bool = False) -> str:
    epl.init(Config({"pipeline.num_micro_batch": 2}, {}))
    with v1.Graph().as_default():
        epl.set_default_strategy(epl.replicate(1))
        data = batches(BATCH * 16, BATCH, False)
        h = layer(data["x"], CLASSES, "one")
        loss = tf.reduce_mean(h)
        tensor = make(h, loss)
        epl.add_to_collection(tensor, key)
        assert epl.get_collection(key) == [tensor] and epl.get_all_collections() == {key: [tensor]}
        step = v1.train.GradientDescentOptimizer(0.1).minimize(tensor if is_trained else loss)
        with v1.train.MonitoredTrainingSession() as session, pytest.raises(UnsupportedOpError) as caught:
            session.run([tensor, step])
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.half
def test_collections_that_have_no_value() -> None:
    assert "is a scalar" in refused(KEYS.GLOBAL_CONCAT_OBJECTS, lambda h, loss: loss)
    assert "is computed once" in refused(KEYS.LOCAL_MEAN_OBJECTS, lambda h, loss: tf.reduce_mean(h * 2.0))
    assert "is computed once" in refused(KEYS.GLOBAL_SUM_OBJECTS, lambda h, loss: tf.reduce_max(h))
    message = refused(KEYS.GLOBAL_MEAN_OBJECTS, lambda h, loss: tf.reduce_sum(h) + loss, is_trained=True)
    assert "adds 'Mean:0' to a sum over examples" in message


@pytest.mark.slow
@pytest.mark.half
def test_collections_of_replicas_that_span_processes() -> None:
    from whale_tf.runtime.active import require

    epl.init()
    with v1.Graph().as_default() as graph:
        epl.set_default_strategy(epl.replicate(1))
        loss = tf.reduce_mean(layer(batches(BATCH * 16, BATCH, False)["x"], CLASSES, "one"))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        wh.parallelize()
        fetches: Any = require("test").fetches[graph]
        fetches.parts = "what this process runs"
        with pytest.raises(UnsupportedOpError, match="devices of several processes"):
            fetches._collected(loss, KEYS.GLOBAL_MEAN_OBJECTS, True)


def test_collections_refuse_what_is_no_tensor_or_is_in_two() -> None:
    epl.init()
    one = tf.constant(1.0)
    epl.add_to_collection(one, KEYS.GLOBAL_MEAN_OBJECTS)
    for tensor, key, message in ((one, KEYS.GLOBAL_SUM_OBJECTS, "leave one of both out"), ("one", KEYS.GLOBAL_SUM_OBJECTS,
                                                                                          "expected a tensor"),
                                 (one, "global_max_objects", "expected one of epl.GraphKeys")):
        with pytest.raises(AnnotationError, match=message):
            epl.add_to_collection(tensor, key)
