"""``zero`` and ``offload`` in tf.functions and ``fit``: the local numbers, everything at home, the local files, refusals."""
from __future__ import annotations

import contextlib
import json
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
import tensorflow as tf

import whale_tf as wh
from tests import graph_optimizer
from tests.functions.equality import Build, Scope, Way, batches, check, clear_keras
from tests.functions.test_training_steps import (
    called,
    cross_entropy,
    keras_adam,
    kernels,
    logits_of,
    momentum,
    perceptron,
    sparse,
)
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.runtime import functions

pytestmark = pytest.mark.no_graph_optimizer  # it takes longer than these steps; with it, variables are divided where they can be
keras = tf.keras
LEVELS: Dict[str, Dict[str, Any]] = {"v1": {"zero": "v1"}, "v2": {"zero": "v2"}, "v3": {"zero": "v3"},
                                     "states": {"offload": "states"}, "v0": {"offload": "v0"}}
STAGE: Dict[str, Any] = {"variables": "stage"}
WAYS = {"2": Way((), 2, {}), "4, recompute": Way((), 4, {"num_micro_batch": 2, "recompute": "full"}),
        "pipeline nested": Way((1, 1), 4, {"num_micro_batch": 2}),
        "stages of 1 and 2, called": Way((1, 2), 3, {"num_micro_batch": 2, "emit": "call"}),
        "2, compiled": Way((), 2, {"xla": True}), "split behind replicas": Way((2, 2), 2, {}, split=(1,))}


def lamb(stages: Sequence[Scope]) -> Tuple[Callable, Sequence]:
    """An optimizer of elementary ops like LAMB (You et al. 2020), and clipping by the global norm."""
    weights = perceptron()
    slots = [[tf.Variable(tf.zeros_like(w), trainable=False) for _ in range(2)] for w in weights]

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, logits_of(weights, stages, x))
        for w, (m, n), grad in zip(weights, slots, tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)[0]):
            m.assign(0.9 * m + 0.1 * grad)
            n.assign(0.99 * n + 0.01 * grad * grad)
            change = m / (tf.sqrt(n) + 1e-3) + 0.01 * w
            w.assign_sub(0.01 * tf.norm(w) / (tf.norm(change) + 1e-9) * change)
        return loss

    return step, weights + [slot for each in slots for slot in each]


BUILDS: Dict[str, Build] = {"momentum": momentum, "keras_adam": keras_adam, "lamb": lamb, "sparse": sparse, "called": called,
                            "kernels": kernels}
RUN = {  # every build, way and level, and most pairs of them
    ("momentum", "4, recompute", "v1"), ("momentum", "pipeline nested", "v0"), ("momentum", "split behind replicas", "v2"),
    ("keras_adam", "2", "v2"), ("keras_adam", "pipeline nested", "v3"), ("lamb", "2", "states"), ("lamb", "4, recompute", "v3"),
    ("kernels", "2", "states"), ("kernels", "pipeline nested", "v2"),
    ("sparse", "stages of 1 and 2, called", "v3"), ("sparse", "2, compiled", "v1"), ("called", "4, recompute", "v2"),
    ("lamb", "stages of 1 and 2, called", "v0"), ("momentum", "split behind replicas", "states")}


@pytest.mark.slow
@pytest.mark.parametrize("build, way, level", [
    pytest.param(build, way, level, marks=[pytest.mark.full] * ((build, way, level) not in RUN)
                 + (graph_optimizer.marks(f"{build}-{way}-{level}") if not WAYS[way].split else [pytest.mark.graph_optimizer]))
    for build in BUILDS for way in WAYS for level in LEVELS])
def test_steps(build: str, way: str, level: str) -> None:
    chosen = WAYS[way]._replace(config={**WAYS[way].config, **LEVELS[level]})
    outcome = check(BUILDS[build], chosen, batches((16, 16, 12)))
    assert outcome.plan is not None and any(task.homes for task in outcome.plan.task_graphs)


@pytest.mark.graph_optimizer
@pytest.mark.slow
@pytest.mark.parametrize("build, way, level", [
    pytest.param(build, way, level, marks=[] if (build, way, level) in {
        ("momentum", "2", "v3"), ("keras_adam", "pipeline nested", "v3"), ("lamb", "4, recompute", "v3"), ("sparse", "2", "v2"),
        ("sparse", "stages of 1 and 2, called", "v3"), ("momentum", "4, recompute", "v1"), ("keras_adam", "2, compiled", "v2"),
        ("lamb", "pipeline nested", "v2")} else [pytest.mark.full])
    for build in ("momentum", "keras_adam", "lamb", "sparse") for way in list(WAYS)[:5] for level in ("v1", "v2", "v3")])
def test_steps_in_parts(build: str, way: str, level: str) -> None:
    chosen = WAYS[way]._replace(config={**WAYS[way].config, **LEVELS[level]})
    outcome = check(BUILDS[build], chosen, batches((16, 16, 12)))
    assert outcome.plan is not None and any(task.parts for task in outcome.plan.task_graphs)


@pytest.mark.slow
@pytest.mark.parametrize("build, way", [
    pytest.param(build, way, marks=[] if (build, way) in {
        ("keras_adam", "pipeline nested"), ("kernels", "pipeline nested"),
        ("sparse", "stages of 1 and 2, called")} else [pytest.mark.full])
    for build in BUILDS for way in ("pipeline nested", "stages of 1 and 2, called")])
def test_variables_with_their_stages(build: str, way: str) -> None:
    outcome = check(BUILDS[build], WAYS[way]._replace(config={**WAYS[way].config, **STAGE}), batches((16, 16, 12)))
    assert outcome.plan is not None
    assert [set(task.homes.values()) for task in outcome.plan.task_graphs] == [{0}, {1}]


# -- places ------------------------------------------------------------------------------------------------------------
def place(variable: tf.Variable) -> int:
    """The number of the only device that has a value of the variable."""
    number, = places(variable)
    return number


def places(variable: tf.Variable) -> List[int]:
    """The numbers of the devices that have values of the variable or its parts, read past everybody."""
    handles = [variable.__dict__["_handle"]]
    record = variable.__dict__.get("_whale_parts")
    if record is not None:
        handles += [part.handle for parts in record.parts.values() for part in parts]
    full = [handle for handle in handles if tf.size(tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)) > 0]
    return [int(tf.DeviceSpec.from_string(handle.device).device_index) for handle in full]


def one_step(build: Build, config: Dict[str, Any], devices: int) -> Tuple[List[tf.Variable], Any, Any]:
    """Variables after a step under a plan, and its graph."""
    wh.init(config, cluster=f"cpu:{devices}")
    step, variables = build([contextlib.nullcontext] * 2)
    batch = [tf.constant(part) for part in batches()[0]]
    step(*batch)
    return list(variables), step, step.get_concrete_function(*batch).graph


@pytest.mark.parametrize("level, expected", [
    ("v1", [0, 2, 1, 3]), ("v2", [0, 2, 1, 3]), ("v3", [0, 2, 1, 3]), ("states", [4] * 4), ("v0", [4] * 4)])
def test_what_is_at_home(level: str, expected: List[int]) -> None:
    """Parameters of 48, 8, 24 and 3 numbers: one on each of four devices, or all on the host, slots beside them."""
    variables, step, graph = one_step(momentum, dict(LEVELS[level], num_micro_batch=2), 4)
    weights, velocities = variables[:4], variables[4:]
    for _ in range(2):
        assert [place(w) for w in weights] == expected and [place(v) for v in velocities] == expected
        whole = [w.numpy() for w in variables]  # as evaluation, checkpoints and assignments need them
        assert [place(w) for w in variables] == [0] * 8 and all(np.all(np.isfinite(w)) for w in whole)
        step(*[tf.constant(part) for part in batches()[1]])
    devices = {op.name: tf.DeviceSpec.from_string(op.device).device_index for op in graph.get_operations()}
    writes = [devices[op.name] for op in graph.get_operations() if op.type.startswith("Assign")]
    assert sorted(writes) == sorted(2 * expected)
    program, text = wh.current_program(), " ".join(wh.explain().split())
    assert program is not None and ("reads anew" in program.to_text()) == (level in ("v3", "v0"))
    reads = [devices[name] for name in devices if "/reads/" in name and "/after/" not in name]
    assert set(reads) == (set(expected) if level in ("v3", "v0") else set())
    assert ("the host: 4" if level in ("states", "v0") else "CPU:0: 1, CPU:1: 1, CPU:2: 1, CPU:3: 1") in text
    added_up = {body.home for body in program.bodies if body.step == "accumulate"}
    assert added_up == (set(expected) if level in ("v2", "v3") else {None})  # None: where a replica computes them


@pytest.mark.slow
def test_functions_that_share_variables() -> None:
    """Each may have them in places of its own, which a plan says, but not inside of one another."""
    x, y = [tf.constant(part) for part in batches()[0]]

    def trains(weights: List[tf.Variable], name: str) -> Callable[[], tf.Tensor]:
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = cross_entropy(y, logits_of(weights, [contextlib.nullcontext] * 2, x))
            for w, grad in zip(weights, tape.gradient(loss, weights)):
                w.assign_sub(0.1 * grad)
            return loss
        step.__name__ = name
        return tf.function(step)

    local, weights = perceptron(), perceptron()
    step = trains(local, "local")
    expected = [step().numpy() for _ in range(7)]
    wh.init({"zero": "v2"}, cluster="cpu:2")
    found = [trains(weights, "first")()]
    assert [place(w) for w in weights] == [0, 1, 1, 1]
    plan = wh.current_plan()
    assert plan is not None
    wh.shutdown()
    saved = json.loads(plan.to_json())
    homes = saved["task_graphs"][0]["homes"]
    homes.update({name: 1 - home for name, home in homes.items()})
    wh.init(cluster="cpu:2", plan={"one": plan, "other": saved})
    one, other = trains(weights, "one"), trains(weights, "other")
    forward = tf.function(lambda: tf.reduce_sum(weights[0]))
    found += [one(), other()]
    assert [place(w) for w in weights] == [1, 0, 0, 0]
    forward()
    found += [other(), one()]
    with tf.GradientTape() as tape:  # takes handles before the function runs
        tape.watch(weights[1])
        found.append(one())
    assert [place(w) for w in weights] == [0, 1, 1, 1]
    for also in (other, lambda: tf.reduce_sum(weights[1])):
        with pytest.raises(wh.PlanError, match="'outer' reads or writes variable .* keeps it on another device .zero"):
            @tf.function
            def outer() -> tf.Tensor:
                return one() + also()

            outer()
    wh.shutdown()
    found.append(one())  # its variables are at home while it runs
    assert [place(w) for w in weights] == [0] * 4
    np.testing.assert_allclose([loss.numpy() for loss in found], expected, rtol=1e-12)
    for alone, divided in zip(local, weights):
        np.testing.assert_allclose(divided.numpy(), alone.numpy(), rtol=1e-12)


# -- Keras -------------------------------------------------------------------------------------------------------------
RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(40, 6), RNG.randint(0, 3, 40)  # mini-batches of 16, 16 and 8


def compiled(stages: Sequence[Scope], optimizer: Any, **options: Any) -> Any:
    inputs = keras.Input((6,))
    with stages[0]():
        x = keras.layers.Dense(8, activation="tanh")(inputs)
    with stages[1]():
        outputs = keras.layers.Dense(3, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


def variables_of(model: Any) -> List[Any]:
    optimizer = model.optimizer.variables
    return [getattr(one, "_value", one) for one in model.variables + (optimizer() if callable(optimizer) else optimizer)]


Script = Callable[[Sequence[Scope]], Tuple[List[Any], Any]]  # -> what it returned, its model


def compare(script: Script, way: Way, at_home: bool = True, in_parts: bool = False) -> None:
    """Runs a script locally and under a plan.

    Args:
        at_home: a step was the last that it did.
        in_parts: the kernels are divided.
    """
    outcomes = []
    for config in (None, way.config):
        clear_keras()
        keras.utils.set_random_seed(0)
        if config is not None:
            wh.init(config, cluster=f"cpu:{way.devices}")
        values, model = script([contextlib.nullcontext] * 2 if config is None else way.scopes())
        if config is not None:
            plan = wh.current_plan()
            assert plan is not None and any(task.homes for task in plan.task_graphs)
            kernels = (6, 8), (8, 3)  # and their slots
            found = [{tuple(sorted(places(one))) for one in variables_of(model) if tuple(one.shape) == shape}
                     for shape in kernels]
            homes = 2 * [{(way.devices,)}] if plan.offload != "none" else [{(0,)}, {(1,)}]
            assert found == (2 * [{tuple(range(way.devices))}] if in_parts else homes) or not at_home
        outcomes.append((values, [one.numpy() for one in variables_of(model)]))
        wh.shutdown()
    (expected, local), (found, parallel) = outcomes
    for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found)):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-9)  # metrics are float32
    assert len(local) == len(parallel) > 6
    for one, other in zip(local, parallel):
        np.testing.assert_allclose(other, one, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("way, level", [
    pytest.param(Way((), 2, {}), "v2", marks=pytest.mark.full), (Way((1, 1), 4, {"num_micro_batch": 2}), "v3"),
    (Way((), 1, {}), "states"), (Way((1, 1), 4, {"num_micro_batch": 2}), "stage")], ids=["v2", "v3", "states", "stage"])
def test_fit(way: Way, level: str, float64: Any) -> None:
    """With evaluation and prediction between steps, values that are set, and several steps in one call."""
    def script(stages: Sequence[Scope]) -> Tuple[List[Any], Any]:
        adam = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
        model = compiled(stages, adam, steps_per_execution=2 if level == "states" else 1)
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        values = [model.fit(X, LABELS, epochs=2, validation_data=(X[:12], LABELS[:12]), **options).history]
        values += [model.evaluate(X, LABELS, verbose=0), model.predict(X[:5], verbose=0)]
        model.set_weights([0.9 * weight for weight in model.get_weights()])
        model.optimizer.learning_rate.assign(0.02)
        return [*values, model.fit(X, LABELS, **options).history], model

    compare(script, way._replace(config={**way.config, **LEVELS.get(level, STAGE)}))


@pytest.mark.graph_optimizer
@pytest.mark.slow
@pytest.mark.parametrize("level", ["v1", pytest.param("v2", marks=pytest.mark.full), "v3"])
def test_fit_in_parts(level: str, float64: Any) -> None:
    def script(stages: Sequence[Scope]) -> Tuple[List[Any], Any]:
        model = compiled(stages, keras.optimizers.Adam(0.01, global_clipnorm=0.5))
        options = {"batch_size": 16, "shuffle": False, "verbose": 0}
        values = [model.fit(X, LABELS, epochs=2, validation_data=(X[:12], LABELS[:12]), **options).history]
        values += [model.evaluate(X, LABELS, verbose=0), model.predict(X[:5], verbose=0)]
        model.set_weights([0.9 * weight for weight in model.get_weights()])
        return [*values, model.fit(X, LABELS, **options).history], model

    compare(script, Way((), 3, {"num_micro_batch": 2, **LEVELS[level]}), in_parts=True)


@pytest.mark.graph_optimizer
@pytest.mark.slow
def test_files_in_parts(float64: Any, tmp_path: Any) -> None:
    _compare_files("v3", Way((), 2, {"num_micro_batch": 2}), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["v2", pytest.param("v0", marks=pytest.mark.full)])
def test_files_are_the_local_ones(level: str, float64: Any, tmp_path: Any) -> None:
    _compare_files(level, Way((), 2, {}), tmp_path)


def _compare_files(level: str, way: Way, tmp_path: Any) -> None:
    """Checkpoints of epochs, saved models and weights: what goes on from any of them is equal, and goes on elsewhere."""
    if not hasattr(keras.optimizers, "AdamW"):
        pytest.skip("this Keras has no .keras format")
    folders = iter(["local", "divided"])

    def script(stages: Sequence[Scope]) -> Tuple[List[Any], Any]:
        folder = tmp_path / next(folders)
        model = compiled(stages, keras.optimizers.SGD(0.1, momentum=0.9))
        options: Dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
        each = keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras"))
        model.fit(X, LABELS, epochs=2, callbacks=[each], **options)
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = saved.write(str(folder / "checkpoint"))
        values = [model.fit(X, LABELS, **options).history]
        saved.read(path).assert_consumed()
        values.append(model.fit(X, LABELS, **options).history)
        for name, value in values[0].items():
            assert value == pytest.approx(values[1][name])
        loaded = keras.models.load_model(folder / "1.keras")
        return [*values, loaded.fit(X, LABELS, **options).history, loaded.get_weights()], loaded

    compare(script, way._replace(config={**way.config, **LEVELS[level]}), at_home=False)
    by_name = [keras.models.load_model(tmp_path / folder / "2.keras") for folder in ("local", "divided")]
    for one, other in zip(*map(variables_of, by_name)):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_interruption(float64: Any, tmp_path: Any) -> None:
    """BackupAndRestore goes on where it was."""
    folders = iter(["local", "divided"])

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    def script(stages: Sequence[Scope]) -> Tuple[List[Any], Any]:
        folder = str(tmp_path / next(folders))
        for callbacks in ([keras.callbacks.LambdaCallback(on_epoch_begin=stop)], []):
            keras.utils.set_random_seed(0)
            model = compiled(stages, keras.optimizers.SGD(0.1, momentum=0.9))
            with contextlib.suppress(KeyboardInterrupt):
                model.fit(X, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0,
                          callbacks=[keras.callbacks.BackupAndRestore(folder), *callbacks])
        return [], model

    compare(script, Way((), 2, LEVELS["v3"]), at_home=False)


@pytest.mark.slow
def test_updates_in_conditions(float64: Any) -> None:
    """Keras 3 updates in a condition where gradients must be finite, and in one more where they are accumulated over steps."""
    if not hasattr(keras, "ops"):
        pytest.skip("Keras 2 does neither")

    def script(stages: Sequence[Scope]) -> Tuple[List[Any], Any]:
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model = compiled(stages, keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0 ** 10, dynamic_growth_steps=2))
        return [model.fit(X, LABELS, batch_size=16, epochs=2, shuffle=False, verbose=0).history], model

    compare(script, Way((), 2, LEVELS["v2"]))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["v3", "states"])
def test_low_precision_and_a_scaled_loss(level: str) -> None:
    """As without homes; a step that overflows is skipped."""
    x = X.astype(np.float32)
    x[20] *= 1e6  # in the second mini-batch of three
    found = []
    for config in ({}, LEVELS[level]):
        keras.utils.set_random_seed(0)
        wh.init({"amp": "float16", "num_micro_batch": 2, **config}, cluster="cpu:2")
        model = compiled([contextlib.nullcontext] * 2, keras.optimizers.SGD(0.1, momentum=0.9))
        losses = model.fit(x, LABELS, batch_size=16, shuffle=False, verbose=0).history["loss"]
        assert int(model.optimizer.iterations) == 2
        found.append([np.array(losses)] + [one.numpy() for one in variables_of(model)])
        wh.shutdown()
    for one, other in zip(*found):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config, message", [
    ({"zero": "v2"}, "zero is 'v2', which divides variables over the replicas .* no TaskGraph of this plan has two"),
    ({"offload": "v0", "variables": "mirrored"}, "variables is 'mirrored', but all replicas of tf.function 'step'")])
def test_what_is_refused(config: Dict[str, Any], message: str) -> None:
    with pytest.raises(wh.ConfigError, match=message):
        one_step(momentum, config, 1)


@pytest.mark.parametrize("variables, cluster, spans, expected", [
    ("auto", "cpu:2", False, "shared"), ("auto", "V100-32GB:2", False, "stage"), ("auto", "cpu:2", True, "stage"),
    ("shared", "V100-32GB:2", False, "shared"), ("stage", "cpu:2", False, "stage")])
def test_variables_go_to_devices_with_memories_of_their_own(variables: str, cluster: str, spans: bool, expected: str) -> None:
    assert functions.settings(Config({"variables": variables}), Cluster.parse(cluster), spans).variables == expected


def test_variable_that_is_an_argument() -> None:
    wh.init({"offload": "states"}, cluster="cpu:1")

    @tf.function
    def step(w: tf.Variable, x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * w) ** 2)
        w.assign_sub(tape.gradient(loss, w))

    with pytest.raises(wh.PlanError, match="variables 'stage' moves a variable that .*'step' gets as its argument .'w:0'."):
        step(tf.Variable(tf.ones([3])), tf.ones([4, 3]))


def test_updates_wait_for_a_check_of_all_gradients() -> None:
    """A refused step changes no variable: IdentityN, which joins the gradients and waits, gives way to what it reads."""
    wh.init({"zero": "v1"}, cluster="cpu:2")
    w, b = tf.Variable(tf.ones([4, 4])), tf.Variable(tf.ones([4]))

    @tf.function
    def step(x: tf.Tensor, most: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b))
        gradients = tape.gradient(loss, [w, b])
        with tf.control_dependencies([tf.debugging.assert_less(loss, most)]):
            gradients = tf.identity_n(gradients)
        for variable, gradient in zip((w, b), gradients):
            variable.assign_sub(0.1 * gradient)

    for _ in range(3):  # else they race
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.ones([4, 4]), tf.constant(-1.0))
    np.testing.assert_array_equal(w, np.ones([4, 4]))
    np.testing.assert_array_equal(b, np.ones([4]))
