"""Control flow, look-ups, rows counted by data: a model with them, divided, computes the local numbers."""
from __future__ import annotations

import contextlib
import os
import zlib
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.runtime import active

pytestmark = pytest.mark.half
PLANS: Dict[str, Tuple[Dict[str, Any], int]] = {
    "data parallel": ({}, 2), "split": ({}, 2), "stages": ({"num_micro_batch": 2}, 2),
    "rhino": ({"auto_parallel": "rhino", "auto.batch_size": 8}, 2)}
IS_FUNCTIONAL = tf.__version__ >= "2"  # loops and conditions are ops with bodies


def weights(name: str, *shape: int) -> tf.Tensor:
    return tf.get_variable(name, initializer=np.random.RandomState(zlib.crc32(name.encode()) % 1000).randn(*shape) / 2)


def loop(x: tf.Tensor) -> tf.Tensor:
    w = weights("w", 6, 6)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))), (0, x))[1]


def condition(x: tf.Tensor) -> tf.Tensor:
    w, v = weights("w", 6, 6), weights("v", 6, 6)
    return tf.cond(tf.placeholder_with_default(True, []), lambda: tf.tanh(tf.matmul(x, w)), lambda: tf.matmul(x, v))


def nested(x: tf.Tensor) -> tf.Tensor:
    """A condition in another one's branch, beside ops that read what it gives; weights outside and in the branches."""
    w, v = weights("w", 6, 6), weights("v", 6, 6)
    h = tf.tanh(tf.matmul(x, w))

    def deep() -> tf.Tensor:
        chosen = tf.cond(tf.reduce_mean(x) > 0.2, lambda: tf.matmul(h, v), lambda: 2.0 * h)
        return tf.sin(chosen) + tf.reshape(tf.concat([chosen, tf.ones_like(h)], 1)[:, 1:7], tf.shape(h))

    return tf.cond(tf.reduce_max(x) > 1.0, deep, lambda: tf.matmul(h, v, transpose_b=True))


def scan(x: tf.Tensor) -> tf.Tensor:
    w = weights("w", 6, 6)
    return tf.scan(lambda a, e: tf.tanh(tf.matmul(a, w) + e), tf.stack([x, x / 2]), initializer=tf.zeros_like(x))[-1]


def array(x: tf.Tensor) -> tf.Tensor:
    w, found, h = weights("w", 6, 6), tf.TensorArray("float64", 3), x
    for i in range(3):
        h = tf.tanh(tf.matmul(h, w))
        found = found.write(i, h)
    return tf.reduce_sum(found.stack(), 0)


def arrays_handed_on(x: tf.Tensor) -> tf.Tensor:
    """The second stage reads arrays that the first one fills: one in a loop."""
    stage: Callable[[], Any] = contextlib.ExitStack if active.current() is None else lambda: wh.replicate(1)
    with stage():
        h = tf.tanh(tf.matmul(x, weights("w", 6, 6)))
        one, two = (tf.TensorArray("float64", 2, clear_after_read=False).unstack(tf.stack([h, each])) for each in (x, 2.0 * h))
    with stage():
        v = weights("v", 6, 6)
        g = tf.while_loop(lambda i, g: i < 2, lambda i, g: (i + 1, tf.tanh(tf.matmul(g, v) + two.read(i))), (0, h))[1]
        return g + one.read(0) * one.stack()[1]


def partition(x: tf.Tensor) -> tf.Tensor:
    side = tf.cast(x[:, 0] > 0, "int32")
    left, right = tf.dynamic_partition(x, side, 2)
    rows = tf.dynamic_partition(tf.range(tf.shape(x)[0]), side, 2)
    return tf.dynamic_stitch(rows, [tf.tanh(tf.matmul(left, weights("w", 6, 6))), tf.matmul(right, weights("v", 6, 6))])


def table(x: tf.Tensor) -> tf.Tensor:
    values = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), tf.constant([2, 0], tf.int64))
    found = tf.lookup.StaticHashTable(values, -1).lookup(tf.cast(x[:, 0] > 0, tf.int64))
    return tf.tanh(tf.matmul(x, weights("w", 6, 6)) + tf.gather(weights("v", 3, 6), found))


def centres(x: tf.Tensor) -> tf.Tensor:
    """Rows of a variable follow the examples of their class: a write of a part, which is no optimizer's."""
    kept = tf.get_variable("kept", initializer=np.ones([3, 6]), trainable=False)
    h = tf.tanh(tf.matmul(x, weights("w", 6, 6)))
    label = tf.cast(x[:, 0] > 0, tf.int32)
    mine = tf.gather(kept, label)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.scatter_sub(kept, label, 0.1 * (mine - tf.stop_gradient(h))))
    return h - 0.5 * mine


def averages(x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(tf.matmul(x, weights("w", 6, 6)))


def train(model: Callable[[tf.Tensor], tf.Tensor], batch: Optional[int], is_split: bool) -> List[float]:
    random = np.random.RandomState(0)
    with tf.Graph().as_default():
        x, y = tf.placeholder("float64", [batch, 6]), tf.placeholder("float64", [batch, 1])
        with contextlib.ExitStack() as stack:
            if is_split:
                stack.enter_context(wh.split(2))
            hidden = tf.tanh(tf.matmul(model(x), weights("out", 6, 4)))
            loss = tf.reduce_mean(tf.square(tf.matmul(hidden, weights("last", 4, 1)) - y))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            update = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
        if model is averages:
            with tf.control_dependencies([update]):
                update = tf.train.ExponentialMovingAverage(0.9).apply(tf.trainable_variables())
        found = []
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for count in (8, 8, batch or 7):
                found.append(session.run([loss, update], {x: random.randn(count, 6), y: random.randn(count, 1)})[0])
            return [float(value) for value in found + [np.sum(v ** 2) for v in session.run(tf.global_variables())]]


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("model, plan, batch", [
    (loop, "split", None), (condition, "split", 8), (condition, "rhino", None), (scan, "split", 8), (loop, "rhino", 8),
    (array, "split", None), (arrays_handed_on, "stages", 8),
    (partition, "split", None), (partition, "data parallel", 8), (table, "split", 8),
    (nested, "split", None), (centres, "split", None), (centres, "data parallel", None),
    (table, "data parallel", None), (averages, "data parallel", None), (averages, "rhino", None)])
def test_local_and_parallel(model: Callable, plan: str, batch: Optional[int]) -> None:
    check(model, plan, batch)


@pytest.mark.slow
@pytest.mark.skipif(not IS_FUNCTIONAL, reason="TensorFlow 1.15 has no other control flow")
@pytest.mark.parametrize("model, plan, batch", [
    (loop, "rhino", None), (condition, "split", None), (nested, "split", 8), (scan, "split", None), (nested, "rhino", None),
    (arrays_handed_on, "stages", 8)])
def test_control_flow_of_tensorflow_1(model: Callable, plan: str, batch: Optional[int]) -> None:
    before = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    try:
        check(model, plan, batch)
    finally:
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()


def check(model: Callable, plan: str, batch: Optional[int]) -> None:
    expected = train(model, batch, False)
    config, devices = PLANS[plan]
    wh.init(config, cluster=f"cpu:{devices}")
    try:
        np.testing.assert_allclose(train(model, batch, plan == "split"), expected, rtol=1e-10)
        if plan != "rhino":  # which may find that nothing is worth dividing
            assert not wh.current_plan().is_local
    finally:
        wh.shutdown()


def averaged(path: str, is_split: bool, use_resource: bool) -> Dict[str, Any]:
    """Trains with averages of the weights; what fetches and a checkpoint have of these, and the weights restored from them."""
    random, found = np.random.RandomState(0), {}
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder("float64", [None, 6])
        with tf.variable_scope("model", use_resource=use_resource), wh.split(2) if is_split else contextlib.nullcontext():
            w, v = weights("w", 6, 6), weights("v", 6, 4)
            loss = tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, w)) @ v))
        update = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, tf.train.get_or_create_global_step())
        average = tf.train.ExponentialMovingAverage(0.9, tf.train.get_global_step())
        with tf.control_dependencies([update]), tf.variable_scope("train"):
            update = average.apply([w, v])
        either = tf.cond(tf.reduce_sum(x) > 0, lambda: w + 0, lambda: tf.pad(v, [[0, 0], [0, 2]]))
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(update, {x: random.randn(5, 6)})
        found["averages"] = session.run([average.average(w), average.average(v)])
        found["branches"] = [session.run(either, {x: np.full([1, 6], sign)}) for sign in (1, -1)]
        saved = tf.train.Saver().save(session, os.path.join(path, "model"))
        reader = tf.train.load_checkpoint(saved)
        found.update((name, [reader.get_tensor(name)]) for name in reader.get_variable_to_shape_map())
        tf.train.Saver(average.variables_to_restore()).restore(session, saved)
        found["restored"] = session.run([w, v])
        if is_split:
            parts = [op.get_attr("shape") for op in tf.get_default_graph().get_operations()
                     if op.type in ("VarHandleOp", "VariableV2") and op.name.startswith("shards/0/")]
            assert all(len(shape.dim) == 2 and 12 <= shape.dim[0].size * shape.dim[1].size <= 18 for shape in map(proto, parts))
            assert len(parts) == 6  # two weights, their slots and their averages
    return found


def proto(shape: Any) -> Any:
    return shape.as_proto() if isinstance(shape, tf.TensorShape) else shape


@pytest.mark.slow
@pytest.mark.parametrize("use_resource", [True, False])
def test_averages_of_divided_variables_are_divided_and_whole_for_others(use_resource: bool, tmp_path: Any) -> None:
    if IS_FUNCTIONAL and not use_resource:
        pytest.skip("TensorFlow 2's conditions read a reference variable before its initial value is there, also locally")
    paths = [tmp_path / "local", tmp_path / "split"]
    for path in paths:
        path.mkdir()
    expected = averaged(str(paths[0]), False, use_resource)
    wh.init({}, cluster="cpu:2")
    try:
        found = averaged(str(paths[1]), True, use_resource)
    finally:
        wh.shutdown()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for value, other in zip(values, found[name]):
            np.testing.assert_allclose(other, value, rtol=1e-10, atol=1e-14, err_msg=name)


def test_branch_that_writes_a_divided_variable_is_refused() -> None:
    wh.init({}, cluster="cpu:2")
    try:
        with tf.Graph().as_default(), wh.split(2):
            x = tf.placeholder("float64", [4, 6])
            with tf.variable_scope("model", use_resource=True):
                w = weights("w", 6, 6)
            tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.matmul(x, w)))
            tf.cond(tf.placeholder_with_default(True, []), lambda: tf.identity(w.assign_add(w)), lambda: w + 0)
            with pytest.raises(wh.UnsupportedOpError, match="'model/w', which wh.split divides"):
                wh.parallelize()
    finally:
        wh.shutdown()
