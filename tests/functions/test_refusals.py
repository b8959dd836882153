"""What is not supported in tf.functions is refused, and the message says what to do instead."""
from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, List

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.functions.conftest import DEVICES
from tests.functions.equality import Scope, batches
from tests.functions.test_training_steps import cross_entropy, logits_of, perceptron
from whale_tf.processes.functions import Functions

NOWHERE: List[Scope] = [contextlib.nullcontext, contextlib.nullcontext]


def loss_of(weights: List[tf.Variable], stages: Any = NOWHERE) -> tf.Tensor:
    x, y = batches()[0]
    return cross_entropy(tf.constant(y), logits_of(weights, stages, tf.constant(x)))


def train(weights: List[tf.Variable], stages: Any = NOWHERE) -> None:
    with tf.GradientTape() as tape:
        loss = loss_of(weights, stages)
    for w, grad in zip(weights, tape.gradient(loss, weights)):
        w.assign_sub(0.1 * grad)


def test_xla() -> None:
    wh.init(cluster="cpu:2")
    weights = perceptron()
    with pytest.raises(wh.PlanError, match="compiled by XLA .jit_compile=True.* leave out jit_compile"):
        tf.function(lambda: train(weights), jit_compile=True)()


def test_copies_of_variables() -> None:
    wh.init({"variables": "mirrored"}, cluster="cpu:2")
    weights = perceptron()
    with pytest.raises(wh.ConfigError, match="variables is 'mirrored'.*'auto' or 'shared'"):
        tf.function(lambda: train(weights))()


def test_initial_values_by_part() -> None:
    wh.init({"init": "sharded"}, cluster="cpu:2")
    weights = perceptron()
    with pytest.raises(wh.ConfigError, match="init is 'sharded', but the variables of tf.function .* have their values before"):
        tf.function(lambda: train(weights, [lambda: wh.split(2), contextlib.nullcontext]))()


def test_gradients_that_are_applied_elsewhere() -> None:
    wh.init(cluster="cpu:2")
    weights = perceptron()

    @tf.function
    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(weights)
        return tape.gradient(loss, weights)

    with pytest.raises(wh.PlanError, match="'gradients' takes gradients .* update the variables in the same function"):
        gradients()


def test_gradients_in_a_loop() -> None:
    wh.init(cluster="cpu:2")
    weights = perceptron()

    @tf.function
    def steps() -> None:
        for _ in tf.range(3):
            train(weights)

    with pytest.raises(wh.PlanError, match="inside a loop or condition .* a function of its own"):
        steps()


def test_annotation_in_a_loop_or_an_inner_function() -> None:
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    weights = perceptron()

    @tf.function
    def inner() -> tf.Tensor:
        return loss_of(weights, [lambda: wh.replicate(1), lambda: wh.replicate(1)])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = inner()
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)

    with pytest.raises(wh.AnnotationError, match="put `with wh.replicate.* around the whole call"):
        step()

    @tf.function
    def looping(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            with wh.replicate(1):
                x = 2 * x
        return x

    with pytest.raises(wh.AnnotationError, match="put the annotation around the whole call"):
        looping(tf.ones([2]))


@pytest.mark.parametrize("options", [{}, {"experimental_use_pfor": False}], ids=["at once", "in a loop"])
def test_jacobian(options: Any) -> None:
    wh.init(cluster="cpu:2")
    weights, x = perceptron(), tf.constant(batches()[0][0])

    @tf.function
    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            sums = tf.reduce_sum(logits_of(weights, NOWHERE, x), 0)
        weights[0].assign_sub(tf.reduce_sum(tape.jacobian(sums, weights[0], **options), 0))

    with pytest.raises(wh.PlanError, match="'step' trains with a tape.jacobian with respect to variables.*take the tape.grad"):
        step()


def test_gradients_of_each_example() -> None:
    wh.init(cluster="cpu:2")
    weights, x = perceptron(), tf.constant(batches()[0][0])

    def gradient(one: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(logits_of(weights, NOWHERE, one[tf.newaxis]))
        return tape.gradient(total, weights[0])

    @tf.function
    def step() -> None:
        weights[0].assign_sub(tf.reduce_mean(tf.vectorized_map(gradient, x), 0))

    with pytest.raises(wh.PlanError, match=r"'step' takes gradients of variables.*a tape inside tf.vectorized_map\) cannot be"):
        step()


def test_forward_mode() -> None:
    wh.init(cluster="cpu:2")
    weights = perceptron()

    @tf.function
    def step() -> None:
        with tf.autodiff.ForwardAccumulator(weights[3], tf.ones_like(weights[3])) as accumulator:
            loss = loss_of(weights)
        weights[3].assign_sub(accumulator.jvp(loss) * tf.ones_like(weights[3]))

    with pytest.raises(wh.PlanError, match="2 devices, but a tf.autodiff.ForwardAccumulator.*with a tf.GradientTape"):
        step()


def test_fewer_devices_than_the_plan_uses() -> None:
    weights = perceptron()  # TensorFlow has started: wh.init makes no more devices
    with pytest.warns(UserWarning, match="the cluster has 64 CPU devices, but TensorFlow has already begun with .*kernel"):
        wh.init(cluster="cpu:64")
    x, y = [tf.concat(64 * [part], 0) for part in batches()[0]]

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, logits_of(weights, NOWHERE, x))
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)

    with pytest.raises(wh.PlanError, match="uses .*CPU:.*, which TensorFlow does not have.*before TensorFlow runs its first op"):
        step()


@pytest.mark.filterwarnings("error:amp is 'float16'")
@pytest.mark.parametrize("config, devices, error, message", [
    ({"zero": "v2"}, 1, wh.ConfigError, "zero is 'v2', .* but no TaskGraph of this plan has two; use wh.replicate"),
    ({"amp": "float16", "amp.loss_scale": 1}, 2, UserWarning, "amp is 'float16' without a loss scale.*to 'dynamic'"),
    ({"recompute": "auto"}, 0, wh.InfeasibleError, r"needs \d+ bytes on a device even if it keeps as little as .* has 200"),
    ({"offload": "states"}, DEVICES, wh.PlanError, "the host, .* offload 'states' keeps variables., which TensorFlow does not")],
    ids=["zero", "float16", "memory", "offload"])
def test_memory_and_precision(config: Any, devices: int, error: Any, message: str) -> None:
    weights, x = [tf.Variable(tf.ones([4, 4]))], tf.ones([2 * DEVICES, 4])
    small = {"kind": "CPU", "memory_bytes": 200, "fp32": 1e10, "memory_bandwidth_bytes_per_s": 1e10}
    wh.init(config, cluster=f"cpu:{devices}" if devices else {
        "device_types": {"Small": small}, "nodes": [{"devices": ["Small"]}]})

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, weights[0]) ** 2)
        weights[0].assign_sub(tape.gradient(loss, weights)[0])

    with pytest.raises(error, match=message):
        step(x)


@pytest.mark.slow
def test_python_function_keeps_xla_from_its_body() -> None:
    wh.init({"xla": True}, cluster="cpu:1")
    w = tf.Variable(tf.ones([4, 4]))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            h = tf.matmul(x, w)
            noise = tf.numpy_function(np.zeros_like, [h], tf.float32, name="python")
            noise.set_shape(h.shape)
            loss = tf.reduce_mean((h + tf.stop_gradient(wh.batch_axis(noise, 0))) ** 2)
        w.assign_sub(tape.gradient(loss, w))

    step(tf.ones([8, 4]))
    assert "XLA compiles t0_backward, each when it first runs; not t0_forward: op 'python' (PyFunc) has no XLA kernel" in (
        " ".join(wh.explain().split()))


def test_other_errors_of_a_step_stay() -> None:
    wh.init(cluster="cpu:2")
    with pytest.raises(tf.errors.InvalidArgumentError, match="as it was"):
        tf.function(lambda x: tf.debugging.check_numerics(x, "as it was"))(tf.constant(np.nan))


def test_function_that_was_traced_before() -> None:
    weights = perceptron()
    step = tf.function(lambda: train(weights))
    step()
    forward = tf.function(lambda: loss_of(weights))
    forward()
    wh.init(cluster="cpu:2")
    with pytest.raises(wh.PlanError, match="2 devices, but the training tf.function .* was called before wh.init"):
        step()
    forward()
    wh.shutdown()
    step()
    wh.init(cluster="cpu:1")
    step()


def test_function_that_is_traced_before_it_is_called() -> None:
    wh.init(cluster="cpu:2")
    weights, (x, y) = perceptron(), batches()[0]

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None], tf.int64)])
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, logits_of(weights, NOWHERE, x))
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)

    step.get_concrete_function()
    step(tf.constant(x), tf.constant(y))
    plan = wh.current_plan()
    assert plan is not None and plan.num_devices == 2


# -- what is no training, or asks for nothing ----------------------------------------------------------------------------
def test_function_that_does_not_train_is_left_alone() -> None:
    weights = perceptron()
    expected = loss_of(weights).numpy()
    wh.init({"num_micro_batch": 2}, cluster="cpu:2")
    annotated = tf.function(lambda: loss_of(weights, [lambda: wh.replicate(1), lambda: wh.replicate(1)]))
    assert annotated().numpy() == pytest.approx(expected, rel=1e-12)
    assert wh.current_plan() is None
    with pytest.warns(UserWarning, match="has annotations .*, but neither it nor any other function takes gradients"):
        wh.shutdown()


@pytest.mark.filterwarnings("error:.*has annotations")
def test_evaluation_may_share_annotations_with_training() -> None:
    keras = tf.keras

    class Model(keras.Sequential):
        def loss_of(self, data: Any) -> Any:
            x, y = data
            predicted = self(x)
            with wh.replicate(2):
                return tf.reduce_mean(tf.square(predicted - y))

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

        def test_step(self, data: Any) -> Any:
            return {"loss": self.loss_of(data)}

    wh.init(cluster="cpu:2")
    model = Model([keras.layers.Dense(1)])
    model.compile("sgd")
    data = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")
    model.evaluate(*data, verbose=0)
    assert tf.function(lambda: model.loss_of(data))().shape == ()
    model.fit(*data, verbose=0, validation_data=data)
    assert wh.current_plan() is not None
    wh.shutdown()


def test_one_device_needs_no_plan() -> None:
    wh.init(cluster="cpu:1")
    weights = perceptron()
    step = tf.function(lambda: train(weights), jit_compile=False)
    step()
    assert wh.current_plan() is None
    nodes = step.get_concrete_function().graph.as_graph_def().node
    assert not [name for node in nodes for name in node.attr if name.startswith("_whale")]


def test_after_shutdown_functions_are_local() -> None:
    wh.init(cluster="cpu:2")
    wh.shutdown()
    step = tf.function(lambda weights: train(weights))
    weights = perceptron()
    step(weights)
    graph = step.get_concrete_function(weights).graph
    assert not [op for op in graph.get_operations() if op.name.startswith("whale")]


def test_a_function_that_processes_refuse_is_refused_again(monkeypatch: Any) -> None:
    """A script may catch the first refusal."""
    def refused(*_: Any) -> None:
        raise wh.PlanError("another graph")

    job = Functions(SimpleNamespace(processes=SimpleNamespace(host_device="/device:CPU:0")), lambda: False)  # type: ignore
    w, b = tf.Variable(1.0), tf.Variable(2.0)
    function = tf.function(lambda: w + b).get_concrete_function()
    monkeypatch.setattr(job, "_agree", refused)
    job.traced(function.graph)
    job._staged[function.graph] = ""
    job._inside[function.graph] = {function.graph}  # type: ignore
    monkeypatch.setattr(job._runtime, "training", contextlib.nullcontext, raising=False)
    for _ in range(2):
        with pytest.raises(wh.PlanError, match="another graph"):
            job.prepare(function)
