"""Runs that make only some of a script's updates: they feed only what these need, and read only these iterators."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh
from whale_tf.ir.walk import reached

BATCH, STEPS = 8, 2
PLANS: Dict[str, Tuple[Dict[str, Any], str]] = {
    "two stages": ({}, "cpu:2"),
    "nested": ({"io.nested_batch": "divide"}, "cpu:4"),
    "gpipe": ({"num_micro_batch": 4, "pipeline.schedule": "gpipe"}, "cpu:2"),
    "zero bubble": ({"num_micro_batch": 4, "pipeline.schedule": "zero_bubble_h1"}, "cpu:2"),
    "zero": ({"zero": "v3", "io.nested_batch": "divide"}, "cpu:4"),
    "offload": ({"offload": "v0"}, "cpu:2"),
    "recomputed": ({"recompute": "full"}, "cpu:2"),
    "asked to be called": ({"emit": "call"}, "cpu:2"),
}


@pytest.fixture(autouse=True)
def _shutdown() -> Iterator[None]:
    yield
    wh.shutdown()


class Pair(NamedTuple):
    """A discriminator and a generator: the generator's loss needs no images."""

    images: tf.Tensor
    noise: tf.Tensor
    losses: Tuple[tf.Tensor, tf.Tensor]
    updates: Tuple[tf.Operation, tf.Operation]


def pair(annotate: bool, images: Any, noise: Any, one_call: bool = False) -> Pair:
    def stage() -> Any:
        return wh.replicate(1) if annotate else contextlib.nullcontext()

    def variable(name: str, *shape: int) -> Any:
        value = np.random.RandomState(len(name)).randn(*shape).astype(noise.dtype.as_numpy_dtype)
        return tf.get_variable(name, initializer=value, use_resource=True)

    with stage():
        both = variable("kernel0", 4, 4)
        fake, images_in = (tf.tanh(tf.matmul(each, both)) for each in (tf.matmul(noise, variable("generator", 3, 4)), images))
    with stage():
        kernel = variable("kernel", 4, 1)
        real, made = tf.matmul(images_in, kernel), tf.matmul(fake, kernel)
        losses = (tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(made) ** 1.5),
                  tf.reduce_mean(tf.nn.softplus(-made)))
        if one_call:  # neither half of the sum needs the other's input
            losses = tf.reduce_mean(tf.nn.softplus(-real)), tf.reduce_mean(tf.square(fake))
    last, first = ([one for one in tf.trainable_variables() if one.op.name.startswith(name)] for name in ("kernel", "generator"))
    optimizers = [tf.train.AdamOptimizer(0.1, epsilon=1e-3) for _ in losses]
    if one_call:
        grads = optimizers[0].compute_gradients(losses[0] + losses[1])
        updates = tuple(optimizer.apply_gradients([each for each in grads if each[1] is own[-1]])
                        for optimizer, own in zip(optimizers, (last, first)))
    else:
        updates = tuple(optimizer.minimize(loss, var_list=own) for optimizer, loss, own in zip(optimizers, losses, (last, first)))
    return Pair(images, noise, losses, updates)  # type: ignore[arg-type]


def initialised(config: Optional[Dict[str, Any]], cluster: str) -> None:
    wh.shutdown()
    if config is not None:
        wh.init({"num_micro_batch": 2, **config}, cluster=cluster)


def rows(columns: int) -> np.ndarray:
    return np.random.RandomState(columns).randn(BATCH, columns)


def trained(config: Optional[Dict[str, Any]], cluster: str = "cpu:2", one_call: bool = False) -> List[np.ndarray]:
    initialised(config, cluster)
    with tf.Graph().as_default():
        model = pair(config is not None, *(tf.placeholder(tf.float64, [None, width]) for width in (4, 3)), one_call=one_call)
        images, noise = {model.images: rows(4)}, {model.noise: rows(3)}
        found: List[Any] = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            call = session.make_callable([model.losses[1], model.updates[1]], [model.noise])
            for _ in range(STEPS):
                alone = images if one_call else {**images, **noise}
                found.append(session.run([model.losses[0], model.updates[0]], alone)[0])
                found.append(session.run([model.losses[1], model.updates[1]], noise)[0])
                session.run(model.updates[1], noise)
                found.append(call(rows(3))[0])
                found.append(session.run([model.losses, model.updates], {**images, **noise})[0])
            found += session.run(tf.trainable_variables())
    return [np.asarray(each) for each in found]


@functools.lru_cache(maxsize=None)
def local(one_call: bool) -> List[np.ndarray]:
    return trained(None, one_call=one_call)


def assert_same(found: List[np.ndarray], expected: List[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("plan", PLANS)
def test_each_update_needs_only_its_own_inputs(plan: str) -> None:
    assert_same(trained(*PLANS[plan]), local(False))


def test_updates_of_one_gradient_call_need_only_their_own_inputs() -> None:
    assert_same(trained({}, one_call=True), local(True))


def nodes_of(session: tf.Session, fetches: Any, feeds: Dict) -> Dict[str, Any]:
    options, metadata = tf.RunOptions(output_partition_graphs=True), tf.RunMetadata()
    session.run(fetches, feeds, options, metadata)
    return {node.name: node for graph in metadata.partition_graphs for node in graph.node}


def test_run_of_both_keeps_the_order_and_a_run_of_one_computes_nothing_else() -> None:
    initialised({}, "cpu:2")
    with tf.Graph().as_default():
        model = pair(True, *(tf.placeholder(tf.float64, [None, width]) for width in (4, 3)))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            both = nodes_of(session, model.updates, {model.images: rows(4), model.noise: rows(3)})
            one = nodes_of(session, model.updates[1], {model.noise: rows(3)})
    real = {f"whale/g0_m{number}_r0/{model.losses[0].op.inputs[0].op.inputs[0].op.inputs[0].op.name}" for number in range(2)}

    sends = {node.attr["tensor_name"].s: name for name, node in both.items() if "Send" in node.op}

    def before(name: str) -> List[str]:
        node = both[name]
        sender = [sends[node.attr["tensor_name"].s]] if "Recv" in node.op and node.attr["tensor_name"].s in sends else []
        return sender + [each.lstrip("^").partition(":")[0] for each in node.input]

    assert real <= set(both) and not real & set(one)
    gates = {name for name in both if name.startswith("whale/order/gate/") and name.endswith("/open")}
    assert gates and any(real & reached([name], before) for name in gates)


def pulled(config: Optional[Dict[str, Any]]) -> List[np.ndarray]:
    initialised(config, "cpu:2")
    with tf.Graph().as_default():
        data = [tf.data.Dataset.from_tensor_slices(np.random.RandomState(width).randn(9 * BATCH, width)).batch(BATCH)
                for width in (4, 3)]
        iterators = [tf.data.make_initializable_iterator(each) for each in data]
        model = pair(config is not None, *(each.get_next() for each in iterators))
        found: List[Any] = []
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), *(each.initializer for each in iterators)])
            for _ in range(STEPS):
                found.append(session.run([model.losses[1], model.updates[1]])[0])
                found.append(session.run([model.losses, model.updates])[0])
            found += session.run([*tf.trainable_variables(), model.images, model.noise])
    return [np.asarray(each) for each in found]


def test_run_takes_no_batch_of_an_iterator_that_it_does_not_need() -> None:
    assert_same(pulled({}), pulled(None))


def scaled(cluster: str, annotate: bool) -> List[np.ndarray]:
    """In float16, with a scale for each update, which grows by itself."""
    initialised({"amp": "float16"} if annotate else {"amp": "float16", "num_micro_batch": None}, cluster)
    with tf.Graph().as_default():
        model = pair(annotate, *(tf.placeholder(tf.float32, [None, width]) for width in (4, 3)))
        images, noise = {model.images: rows(4)}, {model.noise: rows(3)}
        found: List[Any] = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(STEPS):
                found.append(session.run([model.losses[1], model.updates[1]], noise)[0])
                found.append(session.run([model.losses, model.updates], {**images, **noise})[0])
            found += session.run([*tf.trainable_variables(), "whale/loss_scale/steps_1:0", "whale/loss_scale/1/steps_1:0"])
    return [np.asarray(each) for each in found]


def test_each_update_has_its_own_loss_scale() -> None:
    parallel, one_device = scaled("cpu:2", True), scaled("cpu:1", False)
    for one, other in zip(parallel, one_device):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    assert sorted(map(float, parallel[-2:])) == [STEPS, 2 * STEPS]
