"""Searches, saved plans and default strategies, for functions and Keras models that know nothing of them."""
from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Callable, Dict, Iterator, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests.command_line import call
from tests.functions.equality import TOLERANCE, Scope, batches, run
from tests.functions.test_training_steps import cross_entropy, momentum, sparse, variable
from tests.numeric.test_rhino import slow_devices
from tests.numeric.unequal import described
from whale_tf.cli import app
from whale_tf.plan import Plan


def wide(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Weights that are large beside the mini-batch, so that dividing them is worth it."""
    weights = [variable(6, 256), variable(256, 256, seed=2), variable(256, 3, seed=3)]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, tf.tanh(tf.tanh(x @ weights[0]) @ weights[1]) @ weights[2])
        for w, grad in zip(weights, tape.gradient(loss, weights)):
            w.assign_sub(0.1 * grad)
        return loss

    return step, weights


def deep(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """Eight layers and Adam's state, of which two devices hold less than all."""
    weights = [variable(6, 12)] + [variable(12, 12, seed=seed) for seed in range(8)] + [variable(12, 3, seed=9)]
    slots = [[tf.Variable(tf.zeros_like(w), trainable=False) for _ in range(2)] for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for w in weights[:-1]:
                h = tf.tanh(h @ w)
            loss = cross_entropy(y, h @ weights[-1])
        for w, (m, n), grad in zip(weights, slots, tape.gradient(loss, weights)):
            m.assign(0.9 * m + 0.1 * grad)
            n.assign(0.99 * n + 0.01 * grad * grad)
            w.assign_sub(0.01 * m / (tf.sqrt(n) + 1e-3))
        return loss

    return step, weights + [slot for each in slots for slot in each]


BUILDS: Dict[str, Any] = {"momentum": momentum, "sparse": sparse, "wide": wide}


@pytest.fixture
def only_rhino(monkeypatch: Any) -> Iterator[None]:
    """Plans of TaskGraphs, which would win on such small models, are none."""
    from whale_tf.decide import played_steps

    monkeypatch.setattr(played_steps, "to_play", lambda found: [])
    yield


def equal_to_local(build: Any, config: Dict[str, Any], plan: Any = None, default: Any = None, sizes: Any = (16, 16),
                   cluster: Any = "cpu:2") -> Plan:
    """Asserts that the function trains as it does locally; returns the plan of its last trace."""
    local = run(build, batches(sizes))
    wh.init(config, cluster=cluster, plan=plan)
    if default is not None:
        wh.set_default_strategy(default())
    step, variables = build([contextlib.nullcontext] * 4)
    returned = [step(tf.constant(x), tf.constant(y)) for x, y in batches(sizes)]
    for one, other in zip(tf.nest.flatten((local.returned, local.variables)), tf.nest.flatten((returned, variables))):
        np.testing.assert_allclose(np.array(other), one, rtol=10 * TOLERANCE, atol=TOLERANCE)
    found = wh.current_plan()
    assert found is not None and found.num_devices == 2
    wh.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("build, config", [
    ("momentum", {"auto_parallel": True}), ("momentum", {"num_task_graph": 2, "num_micro_batch": 2}),
    pytest.param("sparse", {"auto_parallel": True, "num_micro_batch": 2}, marks=pytest.mark.full)], ids=str)
def test_searches_and_their_plans_again(build: str, config: Dict[str, Any]) -> None:
    plan = equal_to_local(BUILDS[build], config, sizes=(16, 16, 12))
    assert equal_to_local(BUILDS[build], {}, plan.to_json()).task_graphs == plan.task_graphs


@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"num_task_graph": 2, "num_micro_batch": 2}, {"auto_parallel": "dapple", "num_micro_batch": 2}], ids=str)
def test_mini_batches_that_do_not_divide_evenly(config: Dict[str, Any]) -> None:
    equal_to_local(momentum, config, sizes=(8, 7))


@pytest.mark.slow
@pytest.mark.parametrize("config", [
    {"auto_parallel": True, "num_micro_batch": 1, "recompute": "none"}, {"zero": "auto"}], ids=str)
def test_zero_where_memory_is_short(config: Dict[str, Any]) -> None:
    """Data parallelism keeps 0.119 MiB on the fullest of two devices, ZeRO 0.106."""
    plan = equal_to_local(deep, config, sizes=(192, 192), cluster=described([(100, 0.112)] * 2))
    assert plan.zero == "v1" and any(task.homes for task in plan.task_graphs)
    assert max(plan.estimate.peak_memory_bytes) <= 0.112 * 2 ** 20
    assert re.match("without ZeRO: .* too large", plan.estimate.without[0])


@pytest.mark.slow
@pytest.mark.parametrize("build", ["momentum", pytest.param("sparse", marks=pytest.mark.full),
                                   pytest.param("wide", marks=pytest.mark.full)])
def test_rhino_divides_variables(build: str, only_rhino: None) -> None:
    plan = equal_to_local(BUILDS[build], {"auto_parallel": "rhino"}, cluster=slow_devices(2))
    assert plan.estimate.search == "rhino" and set(plan.shards.values()) - {"once"}
    assert equal_to_local(BUILDS[build], {}, plan.to_json(), cluster=slow_devices(2)).shards == plan.shards


@pytest.mark.slow
def test_fit_that_rhino_divides(only_rhino: None) -> None:
    """Embedding, attention and Adagrad; the last mini-batch is smaller, so that the second trace has a batch of unknown size."""
    keras = pytest.importorskip("keras", minversion="3.0")
    from tests.functions.test_keras import LABELS, TOKENS, text

    def fit() -> Any:
        keras.utils.set_random_seed(0)
        model = text([contextlib.nullcontext] * 2)
        history = model.fit(TOKENS, LABELS, batch_size=16, epochs=2, verbose=0).history
        return history["loss"], [weight.numpy() for weight in model.weights + model.optimizer.variables]

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        local = fit()
        wh.init({"auto_parallel": "rhino"}, cluster=slow_devices(2))
        parallel = fit()
    finally:
        keras.config.set_floatx(before)
    plan = wh.current_plan()
    assert plan is not None and {"embedding_column", "column", "stack"} <= set(plan.shards.values())
    np.testing.assert_allclose(parallel[0], local[0], rtol=1e-6)
    for one, other in zip(local[1], parallel[1]):
        np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "split"])
def test_default_strategy(strategy: str) -> None:
    plan = equal_to_local(momentum, {}, default=lambda: getattr(wh, strategy)(2))
    assert [(task.name, task.strategy) for task in plan.task_graphs] == [("default", strategy)]
    wh.init(cluster="cpu:2")
    wh.set_default_strategy(wh.split(2))
    wh.set_default_strategy(None)
    step, _ = momentum([contextlib.nullcontext] * 4)
    step(*[tf.constant(part) for part in batches()[0]])
    plan = wh.current_plan()
    assert plan is not None and plan.task_graphs[0].strategy == "replicate"


@pytest.mark.full
@pytest.mark.slow
def test_experts_beside_a_default_strategy() -> None:
    """A Keras layer of experts is split, all others are replicated on the same devices."""
    keras = pytest.importorskip("keras", minversion="3.0")
    from tests.functions.test_keras import LABELS, X, compiled

    class Experts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.gate, self.inner, self.outer = [
                self.add_weight(shape=size) for size in ((shape[-1], 4), (4, shape[-1], 16), (4, 16, shape[-1]))]

        def call(self, x: Any) -> Any:
            gates, hidden = tf.nn.softmax(x @ self.gate), tf.nn.relu(tf.einsum("bd,edf->ebf", x, self.inner))
            return x + tf.einsum("be,ebf,efd->bd", gates, hidden, self.outer)

    def fit(scope: Scope) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        x = keras.layers.Dense(8, activation="tanh")(inputs)
        with scope():
            x = Experts()(x)
        model = compiled(keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x)))
        history = model.fit(X, LABELS, batch_size=8, shuffle=False, verbose=0, validation_data=(X, LABELS)).history
        return history["val_loss"], [weight.numpy() for weight in model.weights + model.optimizer.variables]

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        local = fit(contextlib.nullcontext)
        wh.init(cluster="cpu:2")
        wh.set_default_strategy(wh.replicate(2))
        parallel = fit(lambda: wh.split(2))
    finally:
        keras.config.set_floatx(before)
    plan = wh.current_plan()
    assert plan is not None and [task.strategy for task in plan.task_graphs] == ["split", "replicate", "replicate"]
    for one, other in zip(tf.nest.flatten(local), tf.nest.flatten(parallel)):
        np.testing.assert_allclose(other, one, rtol=1e-6 if np.ndim(one) == 0 else 1e-11, atol=1e-11)


@pytest.mark.slow
def test_functions_are_named() -> None:
    wh.init(cluster="cpu:2")
    assert wh.current_plan() is None
    for name, scope in (("first", lambda: wh.split(2)), ("second", contextlib.nullcontext)):
        step, _ = momentum([scope, scope])
        x, y = [tf.constant(part) for part in batches()[0]]
        named = tf.function(step.python_function)
        named._name = name
        named(x, y)
    plans = [wh.current_plan(name) for name in ("first", "second")]
    assert plans[0].task_graphs[0].strategy == "split" and plans[1].task_graphs[0].strategy == "replicate"
    assert wh.current_plan() == plans[1] and wh.current_program("first") != wh.current_program()
    assert wh.explain().startswith("tf.function 'second'\nother functions, each with its own plan: wh.explain('first')\n")
    assert "variables are in parts on their devices" in wh.explain("first")
    with pytest.raises(wh.PlanError, match="'third'.: no tf.function of that name was rewritten; .*'first', 'second'"):
        wh.current_plan("third")


@pytest.mark.slow
def test_plans_of_functions_by_name() -> None:
    """One function runs a saved plan, another what its annotations say."""
    data = [tf.constant(part) for part in batches()[0]]

    def named(name: str, scope: Scope = contextlib.nullcontext) -> Tuple[Callable, Sequence]:
        step, variables = momentum([scope, scope, contextlib.nullcontext])
        found = tf.function(step.python_function)
        found._name = name
        return found, variables

    def trained(scope: Scope) -> Any:
        (first, one), (second, other) = named("first"), named("second", scope)
        losses = [step(*data)["loss"] for _ in range(3) for step in (first, second)]
        return [np.array(value) for value in (*losses, *one, *other)]

    local = trained(contextlib.nullcontext)
    wh.init({"num_task_graph": 2, "num_micro_batch": 2}, cluster="cpu:2")
    named("first")[0](*data)
    plan = wh.current_plan()
    assert plan is not None and len(plan.task_graphs) == 2
    wh.init(cluster="cpu:2", plan={"first": plan.to_json()})
    for one, other in zip(local, trained(lambda: wh.split(2))):
        np.testing.assert_allclose(other, one, rtol=10 * TOLERANCE, atol=TOLERANCE)
    first, second = wh.current_plan("first"), wh.current_plan("second")
    assert first == plan and second is not None and second.task_graphs[0].strategy == "split"
    wh.init(cluster="cpu:2", plan={"frist": plan})
    with pytest.warns(UserWarning, match="plans for tf.functions 'frist'; tf.function 'first' has no plan and trains as"):
        named("first")[0](*data)
    wh.init(cluster="cpu:2", plan=plan)
    with pytest.raises(wh.PlanError, match="'step': the plan was made for graph .* name them: wh.init.plan="):
        sparse([contextlib.nullcontext] * 4)[0](*data)
    with pytest.raises(wh.PlanError, match="the plan of tf.function 'first': not a valid plan: num_devices is missing"):
        wh.init(cluster="cpu:2", plan={"first": {"graph": "", "task_graphs": []}})


# -- commands ------------------------------------------------------------------------------------------------------------
SCRIPT = """
import numpy as np
import tensorflow as tf
w = [tf.Variable(np.ones([6, 64], np.float32)), tf.Variable(np.ones([64, 3], np.float32))]

@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        logits = tf.tanh(x @ w[0]) @ w[1]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    for variable, grad in zip(w, tape.gradient(loss, w)):
        variable.assign_sub(0.1 * grad)
    return loss

for _ in range(2):
    print(step(tf.ones([16, 6]), tf.zeros([16], tf.int64)).numpy())
"""


@pytest.mark.slow
def test_commands_know_functions(tmp_path: Any) -> None:
    path = str(tmp_path / "script.py")
    with open(path, "w") as file:
        file.write(SCRIPT)

    result = call(app, "profile", path)
    assert result.exit_code == 0 and "mini-batches of 16" in result.output, result.output
    result = call(app, "plan", "--model", path, "--cluster", "cpu:2", "--global-batch", "16", "-o", path + ".plan")
    assert result.exit_code == 0 and "data parallel on 2" in result.output, result.output
    result = call(app, "explain", "--program", path)
    assert result.exit_code == 0 and "t0_forward" in result.output, result.output
    result = call(app, "profile", path, "--measure", "CPU")
    assert result.exit_code == 1 and "only the steps of Sessions are measured" in result.output, result.output
    assert os.path.exists(path + ".plan")
