"""Mixed precision: parallel plans against one device under the same pass, and what is low."""
from __future__ import annotations

import json
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import whale_tf as wh

pytestmark = pytest.mark.half
BATCH, WORDS, HIDDEN = 16, 6, 8


class Trained(NamedTuple):
    losses: List[float]
    variables: List[np.ndarray]
    hidden: np.ndarray
    text: str
    plan: str


def dense(x: Any, name: str, shape: Sequence[int], random: Any) -> Any:
    kernel = tf.get_variable(f"{name}_kernel", initializer=(random.randn(*shape) * 0.3).astype(np.float32))
    bias = tf.get_variable(f"{name}_bias", initializer=np.zeros(shape[-1:], np.float32))
    return tf.nn.bias_add(tf.tensordot(x, kernel, 1), bias)


def build(scopes: Sequence[Any]) -> Dict[str, Any]:
    """A layer of attention with its norm, a wide layer, and a loss over classes; float32."""
    random = np.random.RandomState(0)
    x = tf.placeholder(tf.float32, [None, WORDS, HIDDEN], name="x")
    labels = tf.placeholder(tf.int32, [None], name="labels")
    with scopes[0]():
        q, k, v = (dense(x, name, (HIDDEN, HIDDEN), random) for name in "qkv")
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * HIDDEN ** -0.5)
        h = x + dense(tf.matmul(weights, v), "o", (HIDDEN, HIDDEN), random)
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        h = (h - mean) * tf.rsqrt(variance + 1e-5) * tf.get_variable("gain", initializer=np.ones(HIDDEN, np.float32))
    with scopes[-1]():
        hidden = tf.nn.relu(dense(h, "up", (HIDDEN, 4 * HIDDEN), random))
        logits = dense(tf.reshape(hidden, [-1, WORDS * 4 * HIDDEN]), "classes", (WORDS * 4 * HIDDEN, 3), random)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    step = tf.train.get_or_create_global_step()
    update = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=step)
    return {"x": x, "labels": labels, "loss": loss, "hidden": hidden, "update": update}


def train(config: Dict[str, Any], scopes: Sequence[Any], cluster: Any = "cpu:1", plan: Any = None, steps: int = 4) -> Trained:
    random = np.random.RandomState(1)
    x, labels = random.randn(BATCH, WORDS, HIDDEN), random.randint(0, 3, BATCH)
    wh.init(config, cluster=cluster, plan=plan)
    try:
        with tf.Graph().as_default():
            with tf.variable_scope("", use_resource="emit" in config):  # with these a called step can be fetched from
                made = build(scopes)
            feed = {made["x"]: x, made["labels"]: labels}
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                losses, hidden = [], None
                for _ in range(steps):
                    loss, hidden, _ = session.run([made["loss"], made["hidden"], made["update"]], feed)
                    losses.append(loss)
                return Trained(losses, session.run(tf.global_variables()), hidden, wh.explain(), wh.current_plan().to_json())
    finally:
        wh.shutdown()


def skipping(config: Dict[str, Any], scopes: Sequence[Any], cluster: Any) -> List[Any]:
    """Variables and the loss scale after each of three steps, the second of which overflows float16 for one example."""
    random = np.random.RandomState(1)
    x, labels = random.randn(BATCH, WORDS, HIDDEN), random.randint(0, 3, BATCH)
    large = np.array(x)
    large[-1] *= 1e5
    wh.init(dict(config, amp="float16"), cluster=cluster)
    try:
        with tf.Graph().as_default():
            made = build(scopes)
            with tf.control_dependencies([made["update"]]):
                after = tf.identity(made["loss"], name="after")
            found = []
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for value in (x, large, x):
                    session.run(after, {made["x"]: value, made["labels"]: labels})
                    found.append(session.run([tf.global_variables(), "whale/loss_scale/scale_again:0"]))
            return found
    finally:
        wh.shutdown()


def one_device() -> Any:
    return wh.replicate(1)


def two_devices() -> Any:
    return wh.replicate(2)


def assert_close(one: Trained, other: Trained, tolerance: float) -> None:
    np.testing.assert_allclose(one.losses, other.losses, rtol=tolerance)
    for a, b in zip(one.variables, other.variables):
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 0.01 * np.sqrt(b.size))


@pytest.fixture(scope="module")
def local() -> Trained:
    return train({"amp": "float16"}, [one_device])


PLANS = {
    "replicas": ([two_devices], "cpu:2", {"variables": "mirrored"}),
    "pipeline": ([one_device, one_device], "cpu:2", {"num_micro_batch": 2}),
    "called": ([two_devices, two_devices], "cpu:4", {"num_micro_batch": 2, "emit": "call"}),
    "split": ([one_device, lambda: wh.split(2)], "cpu:3", {"num_micro_batch": 2}),
    "recomputed": ([one_device], "cpu:1", {"recompute": "full"}),
}


@pytest.mark.half
@pytest.mark.slow
@pytest.mark.parametrize("scopes, cluster, more", list(PLANS.values()), ids=list(PLANS))
def test_plans_train_as_one_device_does(local: Trained, scopes: Any, cluster: str, more: Dict[str, Any]) -> None:
    """float16 has 11 bits, and sums of parts round in other places; fetched activations are float32 with its values."""
    found = train(dict(more, amp="float16"), scopes, cluster)
    assert_close(found, local, 4e-3)
    assert found.hidden.dtype == np.float32
    np.testing.assert_array_equal(found.hidden.astype(np.float16).astype(np.float32), found.hidden)


@pytest.mark.slow
def test_bfloat16_on_two_devices_and_its_plan_as_json() -> None:
    if tf.__version__.startswith("1."):
        with pytest.raises(wh.ConfigError, match="has no CPU kernel of BatchMatMulV2 for it"):
            train({"amp": "bfloat16"}, [one_device])
        return
    one, two = train({"amp": "bfloat16"}, [one_device]), train({"amp": "bfloat16"}, [two_devices], "cpu:2")
    exact = train({}, [one_device])
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-2)
    for ours, low, full in zip(two.variables, one.variables, exact.variables):  # how CPUs round bfloat16 differs between them
        error = max(np.linalg.norm(low - full), 2e-3 * np.linalg.norm(full))
        assert np.linalg.norm(ours - low) <= 2 * error
        assert np.linalg.norm(ours - full) <= 3 * error
    assert "Mixed precision: bfloat16 in 89 of 300 forward and backward ops" in " ".join(two.text.split())
    again = train({}, [two_devices], "cpu:2", plan=json.loads(two.plan))
    assert_close(again, two, 0.0)


def tiny_gradients(config: Dict[str, Any], scaling: bool = False) -> Tuple[np.ndarray, str]:
    """What a step adds to a variable, and what explain() says; ``scaling``: the script's optimizer scales its loss itself."""
    wh.init(config, cluster="cpu:1")
    try:
        with tf.Graph().as_default():
            x = tf.placeholder(tf.float32, [4, 2])
            with wh.replicate(1):
                w = tf.get_variable("w", initializer=np.eye(2, dtype=np.float32) * 0.5)
                loss = tf.reduce_mean(tf.square(tf.matmul(tf.matmul(x, w), w) - 0.2509765625)) * 1e-5
            optimizer = tf.train.GradientDescentOptimizer(1e6)
            if scaling:
                optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(optimizer, "dynamic")
            update = optimizer.minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(update, {x: np.ones([4, 2])})
                return np.array(session.run(w) - np.eye(2) * 0.5), " ".join(wh.explain().split())
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_optimizer_that_scales_its_loss_is_left_alone() -> None:
    found, text = tiny_gradients({"amp": "float16"}, scaling=True)
    assert "gradients with no scale" in text
    np.testing.assert_allclose(found, tiny_gradients({})[0], rtol=5e-3)


def test_first_gradients_of_the_script_are_refused() -> None:
    wh.init({"amp": "float16"}, cluster="cpu:1")
    try:
        with tf.Graph().as_default():
            w = tf.get_variable("w", initializer=np.eye(2, dtype=np.float32))
            product = tf.matmul(tf.placeholder(tf.float32, [4, 2]), w)
            optimizer = tf.train.GradientDescentOptimizer(1.0)
            optimizer.apply_gradients(zip(tf.gradients([product], [w], grad_ys=[product]), [w]))
            with pytest.raises(wh.UnsupportedOpError, match="amp.loss_scale: the script gives tf.gradients its first gradients"):
                wh.parallelize()
    finally:
        wh.shutdown()


@pytest.mark.slow
def test_scaled_gradients_do_not_vanish() -> None:
    """Gradients of 1e-9 are 0 in float16, and right where they went through it scaled."""
    exact = tiny_gradients({})[0]
    np.testing.assert_allclose(tiny_gradients({"amp": "float16"})[0], exact, rtol=5e-3)
    with pytest.warns(UserWarning, match="amp is 'float16' without a loss scale"):
        assert np.abs(tiny_gradients({"amp": "float16", "amp.loss_scale": 1})[0]).max() == 0 < np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("scopes, cluster, config", [
    ([one_device], "cpu:1", {}), ([two_devices], "cpu:2", {"variables": "mirrored", "amp.loss_scale": 1024}),
    ([one_device, two_devices], "cpu:3", {"num_micro_batch": 2})], ids=["one", "mirrored", "pipeline"])
def test_step_that_overflows_is_skipped_as_a_whole(scopes: Any, cluster: str, config: Dict[str, Any]) -> None:
    (first, scale), (second, lower), (third, last) = skipping(config, scopes, cluster)
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one, other)  # slots and the global step, too
    assert all(np.abs(np.asarray(a, float) - b).max() > 0 for a, b in zip(first, third))
    assert (scale, lower, last) == ((2 ** 15, 2 ** 14, 2 ** 14) if "amp.loss_scale" not in config else (1024, 1024, 1024))


@pytest.mark.parametrize("kind, loss_type", [("float64", "float32"), ("float64", "float64"), ("float16", "float32")])
def test_gradients_of_other_types_lose_the_scale_too(kind: str, loss_type: str) -> None:
    """Variables of float64 and float16 beside one of float32, cast for the loss."""
    def trained(config: Dict[str, Any]) -> List[np.ndarray]:
        random = np.random.RandomState(0)
        wh.init(config, cluster="cpu:2")
        try:
            with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
                x = tf.placeholder(tf.float32, [None, 4])
                with wh.replicate(2):
                    w = tf.get_variable("w", initializer=random.randn(4, 3).astype(np.float32))
                    gain = tf.get_variable("gain", initializer=random.randn(3).astype(kind))
                    loss = tf.reduce_mean(tf.square(tf.cast(tf.matmul(x, w), loss_type) * tf.cast(gain, loss_type)))
                train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
                with tf.Session() as session:
                    session.run(tf.global_variables_initializer())
                    session.run(train, {x: random.randn(8, 4)})
                    return session.run([w, gain])
        finally:
            wh.shutdown()

    for found, expected in zip(trained({"amp": "float16", "amp.loss_scale": 128}), trained({})):
        np.testing.assert_allclose(found, expected, rtol=5e-3, atol=5e-3)
